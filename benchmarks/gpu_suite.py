"""Everything that wants a GPU, a part at a time, each in one command of at most nine minutes.

    python benchmarks/gpu_suite.py --part tests|kernels|linear|crossover|fsdp|1b|3b [--out FOLDER] [--small]

    tests      pytest -m gpu
    kernels    GEMMs against the peak, quantizers against a copy           benchmarks/kernels.py
    linear     forward and backward of a layer, every kind, torchao        benchmarks/linear.py
    crossover  from which sizes on a kind is faster than bf16              benchmarks/crossover.py
    fsdp       one rank with FSDP2 against none, the gather's kernels      benchmarks/fsdp.py
    1b, 3b     training steps of Llama 3.2's shapes through the recipe     benchmarks/steps.py

Needs no network, no checkpoint and no data. Writes FOLDER/PART.json and FOLDER/PART.txt, the output. What
lptune imports must be there; where wheels were carried along, `--wheels FOLDER` installs them first, with no
dependencies of theirs. --small (implied without a GPU) runs the same commands on sizes that a CPU finishes.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
TIME_LIMIT_S = 9 * 60


def command(part: str, small: bool, out: Path) -> list[str]:
    """The command line of a part."""
    json_file = ["--json", str(out / f"{part}.json")]
    if part == "tests":
        return [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            "-p",
            "no:cacheprovider",
            str(HERE.parent / "tests"),
        ]
    if part == "kernels":
        return [sys.executable, str(HERE / "kernels.py"), *json_file]
    if part == "linear":
        shape = ["--shape", "256", "256", "256"] if small else []
        return [sys.executable, str(HERE / "linear.py"), *shape, *json_file]
    if part == "crossover":
        options = ["--sizes", "64", "128", "--kind", "int8_rowcol", "--dry-run"] if small else []
        return [sys.executable, str(HERE / "crossover.py"), *options]
    if part == "fsdp":
        options = ["--preset", "llama3_2/tiny", "--seq-len", "64", "--steps", "3", "--compile", "none"]
        return [sys.executable, str(HERE / "fsdp.py"), "--profile", *(options if small else []), *json_file]
    preset = "llama3_2/tiny" if small else f"llama3_2/{part}"
    options = ["--preset", preset, "--work", str(out / "work"), "--minutes", "8.5"]
    if small:
        options += ["--num-steps", "6", "--kind", "int8_rowcol", "--kind", "torchao int8_rowcol"]
        options += ["--override", "data.seq_len=64", "--override", "compile=none"]
    return [sys.executable, str(HERE / "steps.py"), *options, *json_file]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ["tests", "kernels", "linear", "crossover", "fsdp", "1b", "3b"]
    parser.add_argument("--part", choices=parts, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_suite"))
    parser.add_argument("--wheels", type=Path, help="install these wheels first")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.wheels:
        wheels = [str(wheel) for wheel in sorted(args.wheels.glob("*.whl"))]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", *wheels]
        subprocess.run(pip, check=True)
    small = args.small or not torch.cuda.is_available()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    }
    started = time.monotonic()
    log = args.out / f"{args.part}.txt"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command(args.part, small, args.out),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
            if time.monotonic() - started > TIME_LIMIT_S:
                process.kill()
                print(f"stopped after {TIME_LIMIT_S // 60} minutes", flush=True)
                break
        code = process.wait()
    print(f"part {args.part}: exit {code} after {time.monotonic() - started:.0f} s, output in {log}")
    return code


if __name__ == "__main__":
    sys.exit(main())
