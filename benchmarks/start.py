"""From the start of `lptune` to its first line, to the end of the first step and to its exit.

    python benchmarks/start.py                     compile=none, and compile=block with a warm cache
    python benchmarks/start.py --mode cold         compile=block with an empty cache: half a minute each
    python benchmarks/start.py --mode none --ranks 2
    python benchmarks/start.py --source . ../old   of several source trees, one run of each in turns

The model is that of `make quickstart`, so what is measured is the start and not the work. Files of the
packages are in the memory of the system after the first round, which is not counted. Seconds, medians over
the rounds with the smallest and largest.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
STOPS = ("--help, exit", "bare interpreter, exit", "first line", "first step", "last line", "exit")


def main() -> None:
    """Prints a table: a row for each source and setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", nargs="+", type=Path, default=[ROOT], help="folders that hold lptune/")
    parser.add_argument("--rounds", type=int, default=3, help="after one more; 0: that one alone")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--mode", nargs="+", choices=("none", "warm", "cold"), default=["none", "warm"])
    parser.add_argument("--scratch", type=Path, help="a folder whose caches stay for the next call")
    args = parser.parse_args()
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.scratch or Path(scratch)
        folder.mkdir(exist_ok=True)
        if not (folder / "model").exists():
            lptune(args.source[0], folder, "new-checkpoint", "llama3_2/quickstart", "model").wait()
        for number in range(args.rounds + 1):
            for source in args.source:
                found = {("", stop): seconds for stop, seconds in short(source, folder).items()}
                for mode in args.mode:
                    found |= {(mode, stop): s for stop, s in run(source, folder, mode, args.ranks).items()}
                for (mode, stop), seconds in found.items():
                    if number or args.rounds == 0:
                        times[str(source), mode, stop].append(seconds)
    print(f"{'source':24} {'compile':8} {'until':24} {'median':>7} {'smallest':>9} {'largest':>8}")
    for (source_name, mode, stop), seconds_R in sorted(times.items(), key=_order):
        numbers = f"{statistics.median(seconds_R):7.2f} {min(seconds_R):9.2f} {max(seconds_R):8.2f}"
        print(f"{source_name[-24:]:24} {mode:8} {stop:24} {numbers}")


def _order(item: tuple[tuple[str, str, str], list[float]]) -> tuple[str, int, str]:
    (source, mode, stop), _ = item
    return mode, STOPS.index(stop), source


def lptune(source: Path, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`lptune ARGUMENTS` of the tree `source`, with one thread and a cache of its own, in `folder`."""
    cache = folder / f"cache-{source.resolve().name}"
    changed = {
        "PYTHONPATH": str(source.resolve()),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
    }
    command = [sys.executable, "-m", "lptune", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | changed,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def short(source: Path, folder: Path) -> dict[str, float]:
    """Seconds of an interpreter that does nothing, and of `lptune --help`."""
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", ""], check=True)
    bare_s = time.perf_counter()
    lptune(source, folder, "--help").communicate()
    return {"bare interpreter, exit": bare_s - started_s, "--help, exit": time.perf_counter() - bare_s}


def run(source: Path, folder: Path, mode: str, ranks: int) -> dict[str, float]:
    """Seconds until the stops of a run of two steps, without evaluations and samples."""
    if mode == "cold":
        shutil.rmtree(folder / f"cache-{source.resolve().name}", ignore_errors=True)
    shutil.rmtree(folder / "run", ignore_errors=True)
    compiles = "none" if mode == "none" else "block"
    job = ["model.path=model", "output_dir=run", "num_steps=2", "num_samples=0", f"compile={compiles}"]
    job += ["data.eval_fraction=0", f"micro_batch_size={16 // ranks}"]
    launch = ["--nproc-per-node", str(ranks)] if ranks > 1 else []
    found: dict[str, float] = {}
    started_s = time.perf_counter()
    process = lptune(source, folder, "run", *launch, "full_finetune", "--config", "quickstart", *job)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        found["last line"] = time.perf_counter() - started_s
        found.setdefault("first line", found["last line"])
        if line.startswith("step 1/"):
            found["first step"] = found["last line"]
        lines.append(line)
    if process.wait():
        raise SystemExit("".join(lines))
    return found | {"exit": time.perf_counter() - started_s}


if __name__ == "__main__":
    main()
