"""What saving and loading training state costs, beside what the bytes cost anyway.

    python benchmarks/checkpoint.py [--gib 2] [--cold] [--folder FOLDER]

Load: `checkpoint.load_state` into a model and an optimizer, against `load_file` and a clone of every tensor,
which is the least that gives the same bytes in memory of one's own. Then both with verification: every byte
against the manifest, beside one sha256 pass over the same files on all cores.

The two sides take turns in one process, on the same files in the same cache state (--cold: their pages are
dropped before every turn), each into new memory. The ratio is that of the medians, reference over lptune:
above 1, lptune is the faster one.
"""

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from lptune import checkpoint, distributed

WIDTH = 4096
BYTES_PER_PARAMETER = 12  # a float32 weight and both of its moments


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--cold", action="store_true", help="drop the files' pages before every turn")
    parser.add_argument("--folder", type=Path, help="where to write  [default: the temporary folder]")
    arguments = parser.parse_args()
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} of {os.cpu_count()} cores for torch, "
        f"{arguments.gib} GiB, {'cold' if arguments.cold else 'warm'}, medians of {arguments.repetitions}"
    )
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, distributed.session("cpu") as world:
        path = save_part(Path(folder), arguments.gib, world)
        load_part(path, arguments.gib, arguments.repetitions, cold=arguments.cold)


def save_part(folder: Path, gib: float, world: distributed.World) -> Path:
    """Saves a checkpoint of `gib` GiB; returns its folder."""
    model = empty_model(gib)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        nn.init.normal_(parameter)
        moments = {name: torch.rand_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return checkpoint.save_state(folder, 1, model, optimizer, {}, world, 1)


def load_part(path: Path, gib: float, repetitions: int, *, cold: bool) -> None:
    """Prints the ratios of loading, without and with verification."""
    files = sorted(path.glob("*.safetensors"))
    manifest = checkpoint.verify(path)

    def ours(*, verified: bool) -> float:
        model = empty_model(gib)
        optimizer = torch.optim.AdamW(model.parameters())
        return timed(
            lambda: checkpoint.load_state(checkpoint.verify(path) if verified else manifest, model, optimizer)
        )

    def reference(*, verified: bool) -> float:
        kept: list[torch.Tensor] = []

        def load() -> None:
            if verified:
                with ThreadPoolExecutor() as pool:
                    list(pool.map(digest, files))
            for file in files:
                kept.extend(tensor.clone() for tensor in load_file(file).values())

        return timed(load)

    for verified in (False, True):
        times: dict[str, list[float]] = {"reference": [], "lptune": []}
        for _ in range(repetitions):
            for name, load in (("reference", reference), ("lptune", ours)):
                if cold:
                    drop_pages(files)
                times[name].append(load(verified=verified))
        reference_s, lptune_s = (statistics.median(times[name]) for name in ("reference", "lptune"))
        print(
            f"{'verify and load' if verified else 'load':<16}lptune {lptune_s:.3f} s   "
            f"{'sha256 + ' if verified else ''}load_file + clone {reference_s:.3f} s   "
            f"ratio {reference_s / lptune_s:.2f}"
        )


def empty_model(gib: float) -> nn.Module:
    """Square matrices in memory that nothing has touched, as in a run that starts."""
    num_matrices = max(1, round(gib * 2**30 / BYTES_PER_PARAMETER / WIDTH**2))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_matrices)))
    return model.to_empty(device="cpu")


def timed(function: Callable[[], object]) -> float:
    """Seconds it took."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def drop_pages(files: list[Path]) -> None:
    """Out of the page cache; they are on disk already."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()
