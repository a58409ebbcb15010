"""Times saving and loading of checkpoints, against the least time for the same bytes.

    python benchmarks/checkpoint.py [--gib 2] [--cold] [--folder FOLDER]

Save: a synchronous save (files, hashes, manifest, all flushed) is compared with safetensors' `save_file` of
the same tensors into one file, and an fsync. Both keep their previous files until the new ones exist, as a
run does. Then the time for which a save in the background blocks training: the call itself, and the wait of
the next optimizer step, which comes --step-ms later (here a sleep; 0: at once). The first save touches its
buffers for the first time, and is shown separately.

Load: `checkpoint.load_state` into a model and an optimizer is compared with `load_file` and a clone of every
tensor, the least work that gives the same bytes in new memory. Then both with verification: lptune compares
every byte with the manifest; the reference adds one sha256 pass over the same files on all cores.

lptune and the reference take turns in one process, on the same files in the same cache state (--cold: pages
are dropped before every turn), each into new memory. The ratio is median of reference / median of lptune:
above 1, lptune is faster.
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
from safetensors.torch import load_file, save_file
from torch import nn

from lptune import checkpoint, distributed, training
from lptune.config import CheckpointConfig

WIDTH = 4096
BYTES_PER_PARAMETER = 12  # a float32 weight and both of its moments


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--cold", action="store_true", help="drop the files' pages before every turn")
    parser.add_argument("--step-ms", type=float, default=500.0, help="forward and backward after a save")
    parser.add_argument("--folder", type=Path, help="where to write  [default: the temporary folder]")
    arguments = parser.parse_args()
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} of {os.cpu_count()} cores for torch, "
        f"{arguments.gib} GiB, {'cold' if arguments.cold else 'warm'}, medians of {arguments.repetitions}"
    )
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, distributed.session("cpu") as world:
        path = save_part(Path(folder), arguments.gib, arguments.repetitions, arguments.step_ms / 1000, world)
        load_part(path, arguments.gib, arguments.repetitions, cold=arguments.cold)


def save_part(folder: Path, gib: float, repetitions: int, step_s: float, world: distributed.World) -> Path:
    """Prints times and ratios of saving; returns the path of a checkpoint of `gib` GiB."""
    model = empty_model(gib)
    optimizer = training.AdamW(model.parameters())
    for parameter in model.parameters():
        nn.init.normal_(parameter)
        moments = {name: torch.rand_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    tensors = {
        f"{name}/{index}": tensor
        for index, parameter in enumerate(model.parameters())
        for name, tensor in {**optimizer.state[parameter], "": parameter.detach()}.items()
    }
    raw = [folder / "raw-0.safetensors", folder / "raw-1.safetensors"]

    def reference() -> None:
        save_file(tensors, raw[1])
        flush(raw[1])
        raw[0].unlink(missing_ok=True)
        raw[1].rename(raw[0])

    def writer(name: str, **keys: bool) -> checkpoint.CheckpointWriter:
        cfg = CheckpointConfig(keep_last=1, **keys)
        return checkpoint.CheckpointWriter(folder / name, model, optimizer, world, cfg)

    times: dict[str, list[float]] = {"reference": [], "save": [], "background": [], "background, at once": []}
    with writer("synchronous", async_save=False) as synchronous, writer("background") as background:
        for step in range(1, repetitions + 2):  # the first is not counted: it warms up the file system
            times["reference"].append(timed(reference))
            times["save"].append(timed(lambda step=step: synchronous.save(step, {})))
            for number, (name, wait_s) in enumerate((("background", step_s), ("background, at once", 0.0))):
                call_s = timed(lambda step=2 * step + number: background.save(step, {}))
                time.sleep(wait_s)
                times[name].append(call_s + timed(background._wait_for_copy))  # as the optimizer's hook does
                background.wait()
    first_s = times["background"][0]
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    gib = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) / 2**30
    reference_s, save_s = medians["reference"], medians["save"]
    print(
        f"{'save':<16}lptune {save_s:.3f} s ({gib / save_s:.2f} GiB/s)   "
        f"save_file + fsync {reference_s:.3f} s   ratio {reference_s / save_s:.2f}"
    )
    for name in ("background", "background, at once"):
        print(
            f"{name:<20} blocks training for {1000 * medians[name]:.1f} ms, "
            f"{medians[name] / save_s:.2%} of the synchronous save"
        )
    print(f"the first in the background: {1000 * first_s:.1f} ms, {first_s / save_s:.2%}")
    path = background.wait()
    assert path is not None
    return path


def load_part(path: Path, gib: float, repetitions: int, *, cold: bool) -> None:
    """Prints times and ratios of loading, without and with verification."""
    files = sorted(path.glob("*.safetensors"))
    manifest = checkpoint.verify(path)

    def ours(*, verified: bool) -> float:
        model = empty_model(gib)
        optimizer = training.AdamW(model.parameters())
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
    """A model of square matrices in untouched memory, as at the start of a run."""
    num_matrices = max(1, round(gib * 2**30 / BYTES_PER_PARAMETER / WIDTH**2))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_matrices)))
    return model.to_empty(device="cpu")


def timed(function: Callable[[], object]) -> float:
    """The seconds that one call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def flush(file: Path) -> None:
    """Flushes the file to disk (fsync)."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def drop_pages(files: list[Path]) -> None:
    """Drops the pages of the files from the page cache. The files are on disk already."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()
