"""The memory that runs of steps.py are planned to need: read from a table, so that no GPU waits for a plan.

    python benchmarks/planned.py [--setting TEXT]           plans again: two minutes of one core, no GPU

planned.json has the peak in GiB of every label in every setting that gpu_suite.py may run: what `lptune plan`
says for a Hopper GPU. torchao's layers cannot be planned: they count as `none`, whose activations they keep.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_suffix(".json")
RESERVE_GIB = 3.5
"""Not in a plan: the CUDA context, workspaces of libraries, the allocator's fragments."""
LABELS_3B = (
    "none",
    "int8_rowcol",
    "float8_rowwise",
    "float8_tensorwise",
    "torchao float8_rowwise",
    "torchao float8_tensorwise",
    "torchao int8_rowcol",  # last, for the reason in steps.py
)
LABELS_8B = ("int8_rowcol", "none", "int8_weight_only")
VARIANTS = (
    "int8_rowcol",
    "int8_rowcol + data.packing=false",
    "float8_rowwise",
    "int8_rowcol + deterministic=true",
    "int8_rowcol + parallel.reshard_after_forward=true",
    "float8_blockwise",
)


class Setting(NamedTuple):
    """A model, and what its runs change in the settings of steps.py (4 rows of 4096 tokens)."""

    preset: str
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The key in the table."""
        return " ".join((self.preset, *self.overrides))


def settings(part: str, card_gib: float) -> tuple[Setting, Sequence[str]]:
    """(setting, labels) of a part of gpu_suite.py on a card with so much memory; not all labels need fit.

    A part has one setting, so that all its labels can be compared. 3B has 3 rows on an 80 GB card, where
    4 rows would leave 3 GiB for what RESERVE_GIB is for.
    """
    if part == "8b":
        less = ("activation_checkpointing=full", "parallel.reshard_after_forward=true")
        return Setting("llama3_1/8b", less), LABELS_8B
    if part == "llmq":  # a quarter of its 524,288 tokens a step, which changes what updates take, not tokens
        state = ("optimizer.kind=adamw_8bit", "optimizer.master=none", "activation_checkpointing=full")
        rows = ("data.seq_len=1024", "micro_batch_size=16", "global_batch_size=128")
        return Setting("qwen2_5/7b", (*state, *rows)), ("none", "int8_rowcol", "float8_tensorwise")
    if part == "1b":
        return Setting("llama3_2/1b"), LABELS_3B
    fewer = () if card_gib >= 100 else ("global_batch_size=3", "micro_batch_size=3")
    labels = {"first_3b": LABELS_3B[:2], "3b": LABELS_3B, "variants": VARIANTS}[part]
    return Setting("llama3_2/3b", fewer), labels


def peak_gib(setting: Setting, label: str) -> float | None:
    """The planned peak; None if it is not in the table."""
    kind = "none" if label.startswith("torchao ") else label
    table: dict[str, dict[str, float]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table.get(str(setting), {}).get(kind)


def fits(setting: Setting, label: str, card_gib: float) -> bool:
    """Whether the label's planned peak leaves RESERVE_GIB of the card free; what is not planned does."""
    return (peak_gib(setting, label) or 0.0) <= card_gib - RESERVE_GIB


def plan(setting: Setting, label: str, work: Path) -> float:
    """The peak in GiB that the planner finds."""
    from steps import common_overrides, overrides_of, prepare  # benchmarks/steps.py

    from lptune import models
    from lptune.cli import catalog
    from lptune.config import FinetuneConfig, load_config
    from lptune.hardware.devices import named_device
    from lptune.plan.dry_run import dry_run

    folder, text = prepare(work, setting.preset)
    more = overrides_of(label, emulated=False)
    overrides = [*common_overrides(folder, text), *setting.overrides, *more, "device=cuda"]
    cfg = load_config(FinetuneConfig, catalog.find_config("llama3_2/1b"), overrides)
    return dry_run(cfg, models.read_config(folder), 1, named_device("h100")).peak_bytes / 2**30


def main() -> int:
    """Plans, and writes the table after each label."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--setting", default="", help="only those whose key has this text")
    args = parser.parse_args()
    every: dict[Setting, set[str]] = {}
    for part in ("3b", "8b", "variants", "1b", "llmq"):
        for card_gib in (79.6, 139.0):
            setting, labels = settings(part, card_gib)
            every.setdefault(setting, set()).update(each for each in labels if not each.startswith("torchao"))
    table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    with tempfile.TemporaryDirectory() as work:
        for setting, names in every.items():
            for label in sorted(names) if args.setting in str(setting) else ():
                gib = table.setdefault(str(setting), {})[label] = round(plan(setting, label, Path(work)), 1)
                print(f"{setting}: {label} {gib} GiB", flush=True)
                TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
