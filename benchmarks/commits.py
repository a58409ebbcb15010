"""The training step of two checkouts of lptune, in turns: what a change costs or gains.

    git worktree add ../before COMMIT
    python benchmarks/commits.py ../before . [--kind KIND]... [--compile block] [--layers 2] [--rounds 3]

The model has the widths of a preset, few layers and a vocabulary of a few hundred tokens, so that its linear
layers are most of a step. Weights and text are as in benchmarks/steps.py. Each round runs `lptune run` of
both checkouts, one after the other, in processes of their own, with keys that old commits know as well.
Printed are the medians over all steps after the second of each run, their ratio, and the smallest and the
largest ratio of one round: a ratio that is as near to 1 as these two lie apart is noise.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import Results, parser
from steps import prepare  # benchmarks/steps.py

WARM_UP = 2


def step_times_s(checkout: Path, folder: Path, preset: str, keys: list[str]) -> list[float]:
    """Seconds of each step of a run of `checkout` in the new folder `folder`, without the first WARM_UP."""
    command = [sys.executable, "-m", "lptune.cli.main", "run", "full_finetune", "--config", preset]
    command += [*keys, f"output_dir={folder}"]
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{checkout}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["step_time_s"] for record in records if "loss" in record][WARM_UP:]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("before", type=Path, help="a checkout")
    arguments.add_argument("after", type=Path, help="another one")
    arguments.add_argument("--kind", action="append", help="none and int8_rowcol if no kind is given")
    arguments.add_argument("--compile", default="none", choices=["none", "block"])
    arguments.add_argument("--preset", default="llama3_2/1b")
    arguments.add_argument("--layers", type=int, default=2)
    arguments.add_argument("--seq-len", type=int, default=256)
    arguments.add_argument("--steps", type=int, default=6, help="of each run, after the warm-up")
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary, Results(given.json, layers=given.layers) as results:
        work = Path(temporary).resolve()
        checkpoint, text = prepare(work, given.preset, layers=given.layers)
        print(f"{'kind':<28}{'before s':>10}{'after s':>10}{'after/before':>14}   of one round")
        for kind in given.kind or ["none", "int8_rowcol"]:
            keys = [f"model.path={checkpoint}", f"data.source={text}", f"data.seq_len={given.seq_len}"]
            keys += [
                "device=cpu",
                "compute_dtype=bfloat16",
                f"compile={given.compile}",
                f"precision.kind={kind}",
            ]
            keys += ["global_batch_size=1", "micro_batch_size=1", f"num_steps={WARM_UP + given.steps}"]
            before, after, ratios = list[float](), list[float](), list[float]()
            for turn in range(given.rounds):
                found = {}
                for name in ("before", "after"):
                    folder = work / f"{kind}-{turn}-{name}"
                    found[name] = step_times_s(getattr(given, name), folder, given.preset, keys)
                    shutil.rmtree(folder)  # its checkpoint
                before, after = before + found["before"], after + found["after"]
                ratios.append(statistics.median(found["after"]) / statistics.median(found["before"]))
            pair = statistics.median(before), statistics.median(after)
            results.add(kind=kind, before_s=pair[0], after_s=pair[1], ratio=pair[1] / pair[0], ratios=ratios)
            print(f"{kind:<28}{pair[0]:>10.3f}{pair[1]:>10.3f}{pair[1] / pair[0]:>14.3f}", end="   ")
            print(f"{min(ratios):.3f} to {max(ratios):.3f}", flush=True)


if __name__ == "__main__":
    main()
