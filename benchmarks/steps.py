"""Compiled training steps through the recipe, of a model's real shape: tokens/s, MFU and memory of each kind.

    python benchmarks/steps.py [--preset llama3_2/1b] [--kind KIND]... [--minutes 9] [--json FILE]
                               [--work FOLDER] [--override KEY=VALUE]...

Weights are random and the text synthetic: neither changes the time of a step. Each kind is a run of
recipes/full_finetune.py in a process of its own; torchao's kinds run through the very same recipe, with its
conversion in the place of ours. Medians of the steps after the fourth. Kinds for which the time is over are
named, not left out in silence.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lptune.config import PRECISION_KINDS

PEERS = {
    "torchao int8_rowcol": "int8_rowcol",
    "torchao float8_tensorwise": "tensorwise",
    "torchao float8_rowwise": "rowwise",
    "torchao float8_rowwise_with_gw_hp": "rowwise_with_gw_hp",
}
WARM_UP = 4


def prepare(work: Path, preset: str) -> tuple[Path, Path]:
    """(checkpoint, text) under `work`, made once."""
    checkpoint, text = work / preset.replace("/", "-"), work / "text.jsonl"
    work.mkdir(parents=True, exist_ok=True)
    if not checkpoint.exists():
        command = ["new-checkpoint", preset, str(checkpoint), "--dtype", "bfloat16"]
        subprocess.run([sys.executable, "-m", "lptune.cli.main", *command], check=True)
    if not text.exists():
        rng = random.Random(0)
        letters = "abcdefghijklmnopqrstuvwxyz "
        rows = ({"text": "".join(rng.choices(letters, k=20_000))} for _ in range(64))
        text.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return checkpoint, text


def one(label: str, overrides: list[str], checkpoint: Path, text: Path, timeout_s: float) -> dict[str, Any]:
    """The figures of one run, or why there are none."""
    folder = checkpoint.parent / f"run-{label.replace(' ', '-')}"
    command = [sys.executable, __file__, "--child", label, f"model.path={checkpoint}", f"data.source={text}"]
    command += [f"output_dir={folder}", *overrides]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"label": label, "failed": f"not finished after {timeout_s:.0f} s"}
    if done.returncode:
        return {"label": label, "failed": (done.stderr.strip() or done.stdout.strip())[-300:]}
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record["step"] > WARM_UP]
    keys = ("tokens_per_s", "mfu", "bf16_mfu", "peak_memory_gib", "low_precision_flops_fraction")
    values = {key: [r[key] for r in records if r.get(key) is not None] for key in keys}
    figures = {key: statistics.median(found) if found else None for key, found in values.items()}
    return {"label": label, **figures, "wall_s": time.perf_counter() - started}


def child(label: str, overrides: list[str]) -> None:
    """Within the run's own process: the recipe, with torchao's conversion where the label says so."""
    from lptune import linear
    from lptune.cli import catalog, recipe
    from lptune.config import FinetuneConfig, PrecisionConfig, load_config

    if label in PEERS:
        linear.convert = _torchao_convert(PEERS[label])  # type: ignore[assignment]
    else:
        emulated = _emulated(label, PrecisionConfig(kind=label))
        overrides = [*overrides, f"precision.kind={label}", f"precision.emulate={str(emulated).lower()}"]
    cfg = load_config(FinetuneConfig, catalog.find_config("llama3_2/1b"), overrides)
    recipe.load_main(catalog.find_recipe("full_finetune"))(cfg)


def _emulated(kind: str, precision: Any) -> bool:
    from lptune import linear
    from lptune.config import UserError

    if kind == "none":
        return False
    try:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        linear.convert(torch.nn.Linear(16, 16, device=device), precision)
    except UserError:
        return True
    return False


def _torchao_convert(recipe_name: str) -> Any:
    from lptune.linear import LayerPlan, Plan

    def convert(model: torch.nn.Module, *args: object, **kwargs: object) -> Plan:
        def selected(module: torch.nn.Module, name: str) -> bool:
            return isinstance(module, torch.nn.Linear) and name != "lm_head"

        linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        layers = tuple(LayerPlan(n, m.in_features, m.out_features, None) for n, m in linears.items())
        if recipe_name == "int8_rowcol":
            from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
            from torchao.quantization import quantize_

            quantize_(model, Int8MixedPrecisionTrainingConfig(module_swap=True), filter_fn=selected)
        else:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig.from_recipe_name(recipe_name)
            convert_to_float8_training(model, config=config, module_filter_fn=selected)
        return Plan("none", layers)

    return convert


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="llama3_2/1b")
    parser.add_argument("--kind", action="append", choices=[*PRECISION_KINDS, *PEERS])
    parser.add_argument("--minutes", type=float, default=9.0, help="start no further kind when they are over")
    parser.add_argument("--num-steps", type=int, default=12)
    parser.add_argument("--work", type=Path, default=Path("runs/steps"))
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    checkpoint, text = prepare(args.work, args.preset)
    overrides = [f"num_steps={args.num_steps}", "global_batch_size=4", "micro_batch_size=4"]
    overrides += ["data.seq_len=4096", "eval_every_steps=0", "checkpoint.every_steps=0", "resume=none"]
    overrides += args.override
    has_torchao = (
        subprocess.run([sys.executable, "-c", "import torchao"], capture_output=True).returncode == 0
    )
    labels = args.kind or [*PRECISION_KINDS, *(PEERS if has_torchao else [])]
    rows, over = [], []
    print(f"{args.preset}, torch {torch.__version__}, {' '.join(overrides)}")
    print(f"{'':<36}{'tokens/s':>10}{'of bf16':>9}{'MFU':>7}{'bf16 MFU':>10}{'GiB':>7}{'8-bit FLOPs':>13}")
    for label in ["none", *(label for label in labels if label != "none")]:
        left_s = deadline - time.monotonic()
        if left_s < 5:
            over.append(label)
            continue
        row = one(label, overrides, checkpoint, text, left_s)
        rows.append(row)
        print(_line(row, rows[0]), flush=True)
    if over:
        print(f"not run, the time was over: {', '.join(over)}")
    if args.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
        facts = {"preset": args.preset, "torch": torch.__version__, "device": device, "overrides": overrides}
        args.json.write_text(json.dumps(facts | {"rows": rows, "not_run": over}, indent=1) + "\n", "utf-8")


def _line(row: dict[str, Any], bf16: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['label']:<36}failed: {row['failed']}"

    def cell(key: str, form: str, width: int) -> str:
        return f"{format(row[key], form) if row[key] is not None else '-':>{width}}"

    ratio = f"{row['tokens_per_s'] / bf16['tokens_per_s']:.2f}x" if "tokens_per_s" in bf16 else "-"
    cells = (
        cell("tokens_per_s", ",.0f", 10) + f"{ratio:>9}" + cell("mfu", ".1%", 7) + cell("bf16_mfu", ".1%", 10)
    )
    cells += cell("peak_memory_gib", ".1f", 7)
    cells += cell("low_precision_flops_fraction", ".1%", 13)
    return f"{row['label']:<36}{cells}"


if __name__ == "__main__":
    main()
