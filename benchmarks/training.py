"""Does a kind train as well as bf16? Each variant, several seeds, the same rows: held-out loss against bf16.

    python benchmarks/training.py --checkpoint FOLDER --data FILE [--seeds 3] [--num-steps N] [--out FOLDER]
                                  [--variant NAME]...

Every run is `lptune run full_finetune` in a process of its own. A seed decides the order of rows and which
are held out, so a variant is compared with bf16 at the same seed; the table gives the mean difference of the
final held-out losses over seeds and its standard deviation. Runs that stand in OUT already are not repeated.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

VARIANTS: dict[str, list[str]] = {
    "none": [],
    "int8_rowcol": ["kind=int8_rowcol"],
    "int8_rowcol, grad_input column": ["kind=int8_rowcol", "grad_input=column"],
    "int8_rowcol, grad_input requantized": ["kind=int8_rowcol", "grad_input=requantized"],
    "int8_rowcol, grad_input high": ["kind=int8_rowcol", "grad_input=high"],
    "int8_rowcol, grad_weight folded": ["kind=int8_rowcol", "grad_weight=folded"],
    "int8_tensorwise": ["kind=int8_tensorwise"],
    "float8_tensorwise": ["kind=float8_tensorwise"],
    "float8_delayed": ["kind=float8_delayed"],
    "float8_rowwise": ["kind=float8_rowwise"],
    "float8_rowwise, grad_input requantized": ["kind=float8_rowwise", "grad_input=requantized"],
    "float8_rowwise, grad_weight folded": ["kind=float8_rowwise", "grad_weight=folded"],
    "float8_rowwise_with_gw_hp": ["kind=float8_rowwise_with_gw_hp"],
    "float8_blockwise": ["kind=float8_blockwise"],
    "mxfp8": ["kind=mxfp8"],
    "int8_weight_only": ["kind=int8_weight_only"],
}


def final_loss(name: str, seed: int, args: argparse.Namespace) -> tuple[float, float]:
    """(held-out loss before, after) of one run; NaN where it failed."""
    folder = args.out / f"{name.replace(', ', '-').replace(' ', '-')}-seed{seed}"
    losses = _eval_losses(folder)
    if args.num_steps not in losses:
        emulate = ["precision.emulate=true"] if "float8" in name or name == "mxfp8" else []
        command = [sys.executable, "-m", "lptune.cli.main", "run", "full_finetune", "--config"]
        command += [str(args.config), f"model.path={args.checkpoint}", f"data.source={args.data}"]
        command += [f"seed={seed}", f"num_steps={args.num_steps}", f"output_dir={folder}"]
        command += [f"precision.{key}" for key in VARIANTS[name]] + emulate + args.override
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name}, seed {seed}: exit {done.returncode}: {done.stderr.strip()[-200:]}", flush=True)
        losses = _eval_losses(folder)
    return losses.get(0, math.nan), losses.get(args.num_steps, math.nan)


def _eval_losses(folder: Path) -> dict[int, float]:
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        return {}
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--config", default="llama3_2/1b", help="where everything else comes from")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/kinds"))
    parser.add_argument("--variant", action="append", choices=list(VARIANTS))
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    names = ["none", *(name for name in args.variant or VARIANTS if name != "none")]
    finals: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(args.seeds):
        for name in names:
            before, after = final_loss(name, seed, args)
            finals[name].append(after)
            print(f"seed {seed}  {name:<40}{before:9.4f} -> {after:9.4f}", flush=True)
    print("\n| variant | held-out loss, mean of seeds | against bf16, mean ± standard deviation |")
    print("|---|---|---|")
    for name in names:
        differences = [a - b for a, b in zip(finals[name], finals["none"], strict=True)]
        spread = statistics.stdev(differences) if len(differences) > 1 else math.nan
        against = "" if name == "none" else f"{statistics.mean(differences):+.4f} ± {spread:.4f}"
        print(f"| {name} | {statistics.mean(finals[name]):.4f} | {against} |")


if __name__ == "__main__":
    main()
