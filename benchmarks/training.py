"""Compares the held-out loss of each variant with bf16, after training with several seeds on the same rows.

    python benchmarks/training.py [--checkpoint FOLDER --data FILE] [--seeds 3] [--num-steps N] [--out FOLDER]
                                  [--variant NAME]... [--minutes M] [--json FILE]

Every run is `lptune run full_finetune` in its own process. The seed decides the order of rows and which rows
are held out, so a variant is compared with bf16 at the same seed. The table has the mean difference of the
final held-out losses over seeds, and its standard deviation. Without a checkpoint, a small random model
learns the built-in data. Kinds without a GEMM on this device are emulated. A run whose results are already in
OUT is not repeated, if command, checkpoint and data are the same (files with the same sizes and dates).
"""

import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import Results, parser

IDENTITY = "benchmark.json"
"""In a run's folder: the command, and the files that it read."""
VARIANTS: dict[str, list[str]] = {
    "none": [],
    "int8_rowcol": ["precision.kind=int8_rowcol"],
    "int8_rowcol, grad_input column": ["precision.kind=int8_rowcol", "precision.grad_input=column"],
    "int8_rowcol, grad_input requantized": ["precision.kind=int8_rowcol", "precision.grad_input=requantized"],
    "int8_rowcol, grad_input high": ["precision.kind=int8_rowcol", "precision.grad_input=high"],
    "int8_rowcol, grad_weight folded": ["precision.kind=int8_rowcol", "precision.grad_weight=folded"],
    "int8_rowcol, head in 8 bits": ["precision.kind=int8_rowcol", "precision.skip=[]"],
    "int8_rotated": ["precision.kind=int8_rotated"],
    "int8_tensorwise": ["precision.kind=int8_tensorwise"],
    "float8_tensorwise": ["precision.kind=float8_tensorwise"],
    "float8_delayed": ["precision.kind=float8_delayed"],
    "float8_rowwise": ["precision.kind=float8_rowwise"],
    "float8_rowwise, grad_input requantized": [
        "precision.kind=float8_rowwise",
        "precision.grad_input=requantized",
    ],
    "float8_rowwise, grad_weight folded": ["precision.kind=float8_rowwise", "precision.grad_weight=folded"],
    "float8_rowwise_with_gw_hp": ["precision.kind=float8_rowwise_with_gw_hp"],
    "float8_blockwise": ["precision.kind=float8_blockwise"],
    "mxfp8": ["precision.kind=mxfp8"],
    "nvfp4": ["precision.kind=nvfp4"],
    "nvfp4, last block high": ["precision.kind=nvfp4", "precision.skip=[lm_head,model.layers.1.*]"],
    "int8_weight_only": ["precision.kind=int8_weight_only"],
    "int4_weight": ["precision.kind=int4_weight"],
    "bitnet": ["precision.kind=bitnet"],
    "bitnet, folded": [
        "precision.kind=bitnet",
        "precision.grad_input=folded",
        "precision.grad_weight=folded",
    ],
    "adamw_8bit": ["optimizer.kind=adamw_8bit"],
    "adamw_bf16": ["optimizer.kind=adamw_bf16"],
    "master none": ["optimizer.master=none"],
    "master none, adamw_8bit": ["optimizer.master=none", "optimizer.kind=adamw_8bit"],
    "muon": ["optimizer.kind=muon"],
    "sgd": ["optimizer.kind=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.1"],
}


def final_loss(name: str, seed: int, args: Any, timeout_s: float) -> tuple[float, float]:
    """(held-out loss before, held-out loss after) of one run; NaN if it failed."""
    folder = args.out / f"{name.replace(', ', '-').replace(' ', '-')}-seed{seed}"
    command = [sys.executable, "-m", "lptune.cli.main", "run", "full_finetune", "--config"]
    command += [str(args.config), f"model.path={args.checkpoint}", f"data.source={args.data}"]
    command += [f"seed={seed}", f"num_steps={args.num_steps}", f"output_dir={folder}"]
    command += ["checkpoint.at_end=false", "export.enabled=false", *args.override, *VARIANTS[name]]
    identity = {"command": command[3:], "files": [*_files(args.checkpoint), *_files(args.data)]}
    if _earlier(folder) != identity:
        shutil.rmtree(folder, ignore_errors=True)  # its losses must not be confused with those of this run
    losses = _eval_losses(folder)
    if args.num_steps not in losses:
        done = _run(command, timeout_s)
        if "precision.emulate=true" in done.stderr:  # the error names this key if the device lacks the GEMM
            done = _run([*command, "precision.emulate=true"], timeout_s)
        if done.returncode:
            print(f"{name}, seed {seed}: exit {done.returncode}: {done.stderr.strip()[-200:]}", flush=True)
        if folder.exists():
            (folder / IDENTITY).write_text(json.dumps(identity), encoding="utf-8")
        losses = _eval_losses(folder)
    return losses.get(0, math.nan), losses.get(args.num_steps, math.nan)


def _files(path: str | Path) -> list[list[Any]]:
    """[name, size, date] of a file, or of each file of a folder; empty for a name such as `builtin`."""
    path = Path(path)
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    return [[str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _earlier(folder: Path) -> Any:
    try:
        return json.loads((folder / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _run(command: list[str], timeout_s: float) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"not finished after {timeout_s:.0f} s")


def _eval_losses(folder: Path) -> dict[int, float]:
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        return {}
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--checkpoint", type=Path, help="a Hugging Face folder")
    arguments.add_argument("--data", default="builtin", help="a file of rows")
    arguments.add_argument("--config", default="llama3_2/1b", help="where everything else comes from")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--num-steps", type=int, default=100)
    arguments.add_argument("--out", type=Path, default=Path("runs/kinds"))
    arguments.add_argument("--variant", action="append", choices=list(VARIANTS))
    arguments.add_argument("--minutes", type=float, default=24 * 60, help="begin no run after them")
    arguments.add_argument("--override", action="append", default=[], metavar="KEY=VALUE")
    args = arguments.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    if args.checkpoint is None:
        args.checkpoint = args.out / "checkpoint"
        if not args.checkpoint.exists():
            command = ["new-checkpoint", "llama3_2/quickstart", str(args.checkpoint)]
            subprocess.run([sys.executable, "-m", "lptune.cli.main", *command], check=True)
    names = ["none", *(name for name in args.variant or VARIANTS if name != "none")]
    finals: dict[str, list[float]] = {name: [] for name in names}
    with Results(args.json, num_steps=args.num_steps, overrides=args.override, not_run=[]) as results:
        for seed in range(args.seeds):
            for name in names:
                left_s = deadline - time.monotonic()
                if left_s < 1:
                    results.content["not_run"].append(f"{name}, seed {seed}")
                    continue
                started = time.perf_counter()
                before, after = final_loss(name, seed, args, left_s)
                finals[name].append(after)
                wall_s = time.perf_counter() - started
                results.add(variant=name, seed=seed, before=before, after=after, wall_s=wall_s)
                print(f"seed {seed}  {name:<40}{before:9.4f} -> {after:9.4f}", flush=True)
    print("\n| variant | held-out loss, mean of seeds | against bf16, mean ± standard deviation |")
    print("|---|---|---|")
    for name in names:
        if not finals[name]:
            continue
        differences = [a - b for a, b in zip(finals[name], finals["none"], strict=False)]
        against = "" if name == "none" else f"{statistics.mean(differences):+.4f}"
        if against and len(differences) > 1:
            against += f" ± {statistics.stdev(differences):.4f}"
        print(f"| {name} | {statistics.mean(finals[name]):.4f} | {against} |")
    if results.content["not_run"]:
        print(f"not run, the time was over: {'; '.join(results.content['not_run'])}")
    return int(any(row["after"] is None for row in results.rows))


if __name__ == "__main__":
    sys.exit(main())
