"""Damaged checkpoints: every change of any file of one is noticed before training starts.

    python -m tests.faults.corruption

Checkpoints of one rank, of two ranks, and of one rank with its tensors spread over many files. Of the newest
one every file is deleted, truncated, lengthened, zeroed, swapped with another of its folder or with the same
file of another step, or has one bit flipped; its folder is swapped, renamed or copied. Each time resume=PATH
must refuse it, and resume=auto must name it, pass it over for the newest that is intact, and not touch it.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from lptune import checkpoint, distributed
from lptune.base.errors import UserError
from lptune.checkpoint.manifest import step_folder_name
from tests.faults.state import State, many_parts, table
from tests.helpers.ranks import run_ranks

STEPS = (1, 2, 3)
_NEWEST = 3


class Damage(NamedTuple):
    """One change of the newest checkpoint."""

    kind: str
    what: str
    do: Callable[[Path], None]
    """Takes the folder of checkpoints."""
    falls_back_to: int = 2


def write_checkpoints(rank: int, num_ranks: int, folder: str, parts: bool) -> None:
    """Checkpoints of STEPS; on every rank."""
    with distributed.session("cpu") as world:
        state = State(world)
        with state.writer(Path(folder), world, keep_last=9) as writer:
            for _ in STEPS:
                state.advance()
                if parts:
                    with many_parts():
                        state.save(writer, wait=True)
                else:
                    state.save(writer, wait=True)


def damages(folder: Path, num_bits: int, rng: random.Random) -> Iterator[Damage]:
    """Everything that is tried on the newest checkpoint of `folder`.

    num_bits: positions per file in which a bit is flipped, the first and last byte among them.
    """
    newest = folder / step_folder_name(_NEWEST)
    files = sorted(path.name for path in newest.iterdir())
    for name in files:
        size = (newest / name).stat().st_size
        yield Damage("deleted", name, partial(_delete, name))
        for length in sorted({0, size // 2, size - 1}):
            yield Damage("truncated", name, partial(_truncate, name, length))
        for extra in (b"\0", b"\n", bytes(1000)):
            yield Damage("lengthened", name, partial(_lengthen, name, extra))
        for position in sorted({0, size - 1} | {rng.randrange(size) for _ in range(num_bits - 2)}):
            yield Damage("one bit flipped", name, partial(_flip, name, position, 1 << rng.randrange(8)))
        yield Damage("zeroed", name, partial(_zero, name))
        yield Damage("replaced by another step's", name, partial(_copy_from_step, name))
        yield Damage("swapped with another step's", name, partial(_swap_with_step, name), 1)
        yield Damage("replaced by a link", name, partial(_link, name))
    tensors = [name for name in files if name.endswith(".safetensors")]
    for one, other in combinations(tensors, 2):
        yield Damage("swapped within the checkpoint", f"{one}, {other}", partial(_swap_within, one, other))
    yield Damage("a file too many", tensors[0], partial(_duplicate, tensors[0]))
    yield Damage("folders swapped", "steps 2 and 3", _swap_folders, 1)
    yield Damage("folder renamed", "step 3 as step 4", _rename_folder)
    yield Damage("folder copied", "step 1 as step 4", _copy_folder, _NEWEST)
    yield Damage("folder emptied", "step 3", _empty_folder)


def _newest(folder: Path, name: str = "") -> Path:
    return folder / step_folder_name(_NEWEST) / name


def _delete(name: str, folder: Path) -> None:
    _newest(folder, name).unlink()


def _truncate(name: str, length: int, folder: Path) -> None:
    os.truncate(_newest(folder, name), length)


def _lengthen(name: str, extra: bytes, folder: Path) -> None:
    with _newest(folder, name).open("ab") as file:
        file.write(extra)


def _flip(name: str, position: int, bit: int, folder: Path) -> None:
    with _newest(folder, name).open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ bit]))


def _zero(name: str, folder: Path) -> None:
    path = _newest(folder, name)
    path.write_bytes(bytes(path.stat().st_size))


def _copy_from_step(name: str, folder: Path) -> None:
    shutil.copyfile(folder / step_folder_name(2) / name, _newest(folder, name))


def _swap_with_step(name: str, folder: Path) -> None:
    _swap(_newest(folder, name), folder / step_folder_name(2) / name)


def _link(name: str, folder: Path) -> None:
    path = _newest(folder, name)
    path.rename(folder / name)
    path.symlink_to(folder / name)


def _swap_within(one: str, other: str, folder: Path) -> None:
    _swap(_newest(folder, one), _newest(folder, other))


def _swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _duplicate(name: str, folder: Path) -> None:
    shutil.copyfile(_newest(folder, name), _newest(folder, "model-00009.safetensors"))


def _swap_folders(folder: Path) -> None:
    _swap(folder / step_folder_name(2), _newest(folder))


def _rename_folder(folder: Path) -> None:
    _newest(folder).rename(folder / step_folder_name(4))


def _copy_folder(folder: Path) -> None:
    shutil.copytree(folder / step_folder_name(1), folder / step_folder_name(4))


def _empty_folder(folder: Path) -> None:
    for path in _newest(folder).iterdir():
        path.unlink()


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_ino, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def missed(damage: Damage, good: Path, within: Path, world: distributed.World) -> str | None:
    """Applies `damage` to a copy of `good`; what was not noticed, or None."""
    folder = within / "damaged"
    shutil.copytree(good, folder, copy_function=shutil.copyfile)
    try:
        damage.do(folder)
        before = _listing(folder)
        newest = max(path for path in folder.glob("step-*"))
        try:
            checkpoint.find_checkpoint(folder, str(newest), world, print)
        except UserError as error:
            if "\n" in str(error):
                return f"more than a line: {error}"
        else:
            return "resume=PATH took it"
        warnings: list[str] = []
        found = checkpoint.find_checkpoint(folder, "auto", world, warnings.append)
        if found is None or found.step != damage.falls_back_to:
            return f"auto chose {found and found.step}"
        if not warnings or newest.name not in warnings[0]:
            return f"not named: {warnings}"
        State().load(found)
        if _listing(folder) != before:
            return "the folder was changed"
        return None
    finally:
        shutil.rmtree(folder)


def corruption(num_bits: int, seed: int, within: Path) -> tuple[Counter[tuple[str, str]], list[str]]:
    """How often each kind was tried on each layout, and what was missed."""
    counts, wrong = Counter[tuple[str, str]](), []
    rng = random.Random(seed)
    for layout, ranks, parts in (
        ("1 rank", 1, False),
        ("1 rank, many files", 1, True),
        ("2 ranks", 2, False),
    ):
        good = within / layout
        if ranks > 1:
            run_ranks(ranks, write_checkpoints, str(good), parts)
        else:
            write_checkpoints(0, 1, str(good), parts)
        with distributed.session("cpu") as world:
            for damage in damages(good, num_bits, rng):
                counts[damage.kind, layout] += 1
                if line := missed(damage, good, within, world):
                    wrong.append(f"{layout}: {damage.what} {damage.kind}: {line}")
    return counts, wrong


def main() -> None:
    """Runs the long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bits", type=int, default=40, help="positions per file in which a bit is flipped")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lptune-corruption-") as within:
        counts, wrong = corruption(args.bits, args.seed, Path(within))
    layouts = list(dict.fromkeys(layout for _, layout in counts))
    kinds = list(dict.fromkeys(kind for kind, _ in counts))
    rows = [[kind, *(counts[kind, layout] for layout in layouts)] for kind in kinds]
    print(table(["changed", *layouts], rows))
    total = sum(counts.values())
    print(f"{total - len(wrong)} of {total} noticed, {time.monotonic() - started:.0f} s")
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
