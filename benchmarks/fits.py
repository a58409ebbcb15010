"""Which model fits which GPU, and with which changes: the tables of README.md and docs/plan.md.

    python benchmarks/fits.py                prints both tables: ten minutes of one core, no GPU
    python benchmarks/fits.py --write        writes them in place of the tables that stand there
    python benchmarks/fits.py --model 8B --gpus 1x24

Each cell is what `lptune plan --config CONFIG --world-size N --device GPU --host-memory GB --write my.yaml
precision.kind=int8_rotated` would write: the config as it is, or with the first change that fits, or with
several together. A fit leaves a tenth of the memory free; a rank may take HOST times its GPU's memory of the
host. Nothing is run. Speed is not in the tables: what predicts it
(lptune/plan/from_counts.py) knows no update but AdamW's in float32, no recomputation and no exchange.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lptune.base.text import size_text
from lptune.cli import planned_model
from lptune.hardware.devices import named_device
from lptune.plan import fit
from lptune.plan.dry_run import DryRun, dry_run

KIND = "int8_rotated"
MODELS = {
    "1B": "llama3_2/1b",
    "3B": "llama3_2/3b",
    "8B": "llama3_1/8b",
    "14B": "qwen3/14b",
    "32B": "qwen3/32b",
}
DEVICES = {16: "4080", 24: "4090", 48: "l40s", 80: "h100", 141: "h200"}
"""GB -> a GPU with so much."""
GPUS = ("1x16", "1x24", "1x48", "1x80", "1x141", "4x24", "8x24", "4x80", "8x80")
HOST = 4
"""GB of host memory for each GB of a GPU."""
LETTERS = {
    "parallel.reshard_after_forward": "S",
    "parallel.reduce_every_micro_batch": "R",
    "micro_batch_size": "1",
    "optimizer.kind=adamw_bf16": "M16",
    "optimizer.kind=adamw_8bit": "M8",
    "activation_checkpointing": "F",
    "optimizer.master": "W",
    "precision.all_gather": "H",
    "optimizer.in_backward": "G",
    "optimizer.cpu_offload": "O",
    "parallel.cpu_offload": "C",
}
"""Change -> its sign in the tables, in the order of what it costs."""
ROOT = Path(__file__).parents[1]
PAGES = {"README.md": False, "docs/plan.md": True}
"""Page -> whether its table has the peaks."""


class Cell(NamedTuple):
    """What fits, or the least that was found."""

    fits: bool
    signs: str
    """Of the changes; empty: the config as it is."""
    peak_bytes: int
    host_bytes: int
    words: str
    """What a user types."""

    def text(self, *, in_full: bool) -> str:
        """The cell as the tables have it."""
        if not in_full:
            return in_a_word(self.fits, self.signs)
        host = f" + {size_text(self.host_bytes)} host" if self.host_bytes else ""
        if not self.fits:
            return f"no: {size_text(self.peak_bytes)}{host}"
        return f"{size_text(self.peak_bytes)}{host}: {self.signs or 'as it is'}"


def in_a_word(fits: bool, signs: str) -> str:
    """A cell of the short table."""
    if not fits:
        return "–"
    return "host" if {"O", "C"} & set(signs.split()) else "changed" if signs else "yes"


def cell(model: str, gpus: str) -> Cell:
    """What fits of `model`, one of MODELS, on `gpus`, one of GPUS."""
    number, _, gigabytes = gpus.partition("x")
    num_ranks, device = int(number), named_device(DEVICES[int(gigabytes)])
    cfg, _, path, _ = planned_model.load("plan", MODELS[model], [f"precision.kind={KIND}"], None)
    facts, _, _ = planned_model.of_config(cfg, path, None)
    found = fit.dry_run(cfg, facts, num_ranks, device)
    if fit.fits(found.peak_bytes, device):
        return Cell(True, "", found.peak_bytes, 0, "")
    least = Cell(False, "", found.peak_bytes, 0, "")
    host_bytes = HOST * int(gigabytes) * 1e9
    for tried in fit.remedies(cfg, facts, num_ranks, device, found, same_ranks=True, host_bytes=host_bytes):
        signs = " ".join(_signs(tried.change))
        each = Cell(tried.fits, signs, tried.found.peak_bytes, tried.found.host_bytes, tried.words)
        if each.fits:
            return each
        least = min(least, each, key=lambda cell: cell.peak_bytes)
    return least


def _signs(change: fit.Remedy) -> Iterator[str]:
    for name, sign in LETTERS.items():
        key, _, value = name.partition("=")
        if key in change and value in ("", change[key]):
            yield sign


def table(cells: dict[tuple[str, str], Cell], *, in_full: bool) -> list[str]:
    """The table in Markdown. Its first line is the same for all contents."""
    lines = [f"| GB of GPU | {' | '.join(gpus.removeprefix('1x').replace('x', ' x ') for gpus in GPUS)} |"]
    lines.append("|---" * (len(GPUS) + 1) + "|")
    for model in dict.fromkeys(model for model, _ in cells):
        row = [cells[model, gpus].text(in_full=in_full) for gpus in GPUS]
        lines.append(f"| {model} | {' | '.join(row)} |")
    return lines


def replaced(page: str, lines: list[str]) -> str:
    """`page` with the table whose first line is that of `lines` replaced by `lines`."""
    before = page.splitlines()
    first = before.index(lines[0])
    last = next(i for i in range(first, len(before)) if not before[i].startswith("|"))
    return "\n".join([*before[:first], *lines, *before[last:]]) + "\n"


def remember_plans() -> None:
    """Makes GPUs of one architecture share their plans, which do not depend on the memory."""
    known: dict[tuple[Any, ...], DryRun] = {}

    def planned(cfg: Any, facts: Any, num_ranks: int, device: Any, **options: Any) -> DryRun:
        key = repr(cfg), repr(facts), num_ranks, device.capability
        if key not in known:
            known[key] = dry_run(cfg, facts, num_ranks, device, **options)
        return known[key]

    fit.dry_run = planned  # type: ignore[assignment]


def main() -> None:
    """Prints or writes the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--gpus", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--write", action="store_true", help="write the tables of all cells into the pages")
    args = parser.parse_args()
    if args.write and (args.model, args.gpus) != (list(MODELS), list(GPUS)):
        parser.error("--write: takes all models and GPUs")
    remember_plans()
    cells = {}
    for model in args.model:
        for gpus in args.gpus:
            found = cells[model, gpus] = cell(model, gpus)
            print(f"{model:>4} on {gpus:<6} {found.text(in_full=True):<40} {found.words}", flush=True)
    if len(cells) < len(MODELS) * len(GPUS):
        return
    for name, in_full in PAGES.items():
        lines, page = table(cells, in_full=in_full), ROOT / name
        print("", *lines, sep="\n")
        if args.write:
            page.write_text(replaced(page.read_text(encoding="utf-8"), lines), encoding="utf-8")


if __name__ == "__main__":
    main()
