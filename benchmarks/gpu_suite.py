"""Runs all measurements that need a GPU, in three calls of at most nine minutes, or one part at a time.

    python benchmarks/gpu_suite.py --call 1|2|3 [--out FOLDER] [--work FOLDER] [--small] …
    python benchmarks/gpu_suite.py --part NAME …

    call 1   tests      the tests marked gpu
             kernels    GEMMs and quantizers against their rooflines, ours and torch's     kernels.py
             linear     a linear layer in every kind, beside torchao's                     linear.py
    call 2   3b         training steps of Llama 3.2 3B, beside torchao's; two profiles     steps.py
             1b         the same of 1B
    call 3   quality    300 steps in bf16, INT8 and float8: held-out losses                training.py
             8b         8B on one GPU, memory beside its plan                              steps.py
             variants   3B with trial settings (LPTUNE_TRY, keys)                          steps.py
             block      a decoder block in every kind, beside torchao's                    linear.py
             crossover  layer sizes from which a kind is faster than bf16                  crossover.py
    apart    fsdp       one rank with and without FSDP2                                    fsdp.py

The most important parts come first in each call. OUT/call-N.json gets the results of every part as they come,
OUT/call-N.txt the output with its tables, so an interrupted call keeps what was measured. No network,
checkpoint or data is needed; --checkpoint and --data give `quality` real ones. --wheels FOLDER installs the
wheels of that folder first, for this run only. --small (the default without a GPU) runs the same commands
with sizes that a CPU can finish.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent
CALLS = {
    1: ("tests", "kernels", "linear"),
    2: ("3b", "1b"),
    3: ("quality", "8b", "variants", "block", "crossover"),
}
LIMITS_S = {
    "tests": 240,
    "kernels": 200,
    "linear": 200,
    "3b": 400,
    "1b": 400,
    "quality": 110,
    "8b": 210,
    "variants": 300,
    "block": 150,
    "crossover": 540,
    "fsdp": 300,
}
"""Each is also cut at what the call has left."""
LABELS_8B = ("int8_rowcol", "none", "int8_weight_only")
VARIANTS = (
    "int8_rowcol",
    "int8_rowcol + large_loss_chunks",
    # cuDNN attention needs rows of one document, so its baseline is not packed either.
    "int8_rowcol + data.packing=false",
    "int8_rowcol + data.packing=false + cudnn_attention",
    "float8_rowwise",
    "float8_rowwise + cublaslt_rowwise",
    "int8_rowcol + grouped_varlen",
    "int8_rowcol + deterministic=true",
    "int8_rowcol + parallel.reshard_after_forward=true",
    "float8_blockwise",
    "float8_blockwise + cublaslt_blocks",
)
SMALL_STEPS = ["--preset", "llama3_2/tiny", "--override", "data.seq_len=64", "--override", "compile=none"]


class Part(NamedTuple):
    """One command of a call, with its limits."""

    command: list[str]
    environment: dict[str, str]


def part(name: str, args: argparse.Namespace, json_file: Path, minutes: float) -> Part:
    """The command of the part `name`. It writes `json_file`, and begins nothing new after `minutes`."""
    small, work = args.small, args.work
    until = ["--minutes", f"{minutes:.2f}"]

    def script(file: str, *options: str) -> Part:
        return Part([sys.executable, str(HERE / file), "--json", str(json_file), *options], {})

    if name == "tests":
        return _tests(args, json_file)
    if name == "kernels":
        return script("kernels.py", *(["--shape", "256", "256", "256"] if small else []))
    if name == "linear":
        sizes = ["--shape", "64", "64", "64", "--kind", "int8_rowcol"] if small else ["--rounds", "5"]
        return script("linear.py", "--mode", "compiled", *sizes)
    if name == "block":
        tiny = ["llama3_2/tiny", "--tokens", "64", "--kind", "int8_rowcol", "--rounds", "2"]
        return script("linear.py", "--mode", "compiled", "--block", *(tiny if small else ["llama3_2/3b"]))
    if name == "crossover":
        if small:
            return script("crossover.py", "--sizes", "64", "--kind", "int8_rowcol", "--dry-run", *until)
        kinds = ["--kind", "int8_rowcol", "--kind", "float8_rowwise"]
        return script("crossover.py", *kinds, "--rounds", "3", "--dry-run", *until)
    if name == "fsdp":
        tiny = ["--preset", "llama3_2/tiny", "--seq-len", "64", "--steps", "3", "--compile", "none"]
        return script("fsdp.py", "--profile", *(tiny if small else []))
    if name == "quality":
        # Autotuning would take longer than these small steps.
        made = script("training.py", *_quality(args), "--out", str(work / "quality"), *until)
        return made._replace(environment={"LPTUNE_AUTOTUNE": "0"})
    labels: Sequence[str] = {"8b": LABELS_8B, "variants": VARIANTS}.get(name, ())
    options = ["--work", str(work / "steps"), *until]
    if small:
        labels = labels[:2] or ("none", "int8_rowcol", "torchao int8_rowcol")
        options += [*SMALL_STEPS, "--profile", "int8_rowcol"]
    else:
        options += ["--preset", {"8b": "llama3_1/8b", "1b": "llama3_2/1b"}.get(name, "llama3_2/3b")]
        if name == "3b":
            options += ["--profile", "none", "--profile", "int8_rowcol"]
        if name == "8b":  # only the labels that fit into memory
            options += ["--override", "activation_checkpointing=full"]
            options += ["--override", "parallel.reshard_after_forward=true"]
    return script("steps.py", *options, *(word for label in labels for word in ("--label", label)))


def _tests(args: argparse.Namespace, json_file: Path) -> Part:
    # Only files with GPU tests, because each worker collects all files that it gets.
    files = [
        str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()
    ]
    options = [
        "-q",
        "-m",
        "gpu",
        "-W",
        "default",
        "--continue-on-collection-errors",
        "-p",
        "no:cacheprovider",
    ]
    options += ["-p", "pytest_results", "-p", "no:benchmark"]
    environment = {"LPTUNE_TEST_RESULTS": str(json_file), "LPTUNE_AUTOTUNE": "0"}
    if importlib.util.find_spec("xdist") is not None:
        options += ["-n", "2" if args.small else "8"]
    if args.small:  # only the tests of the recipe also run on a CPU
        files = [str(ROOT / "tests" / "recipes" / "test_on_gpu.py")]
        options += ["-k", "int8_rowcol"]
        environment["LPTUNE_GPU_TESTS_ON"] = "cpu"
    return Part([sys.executable, "-m", "pytest", *options, *files], environment)


def _quality(args: argparse.Namespace) -> list[str]:
    variants = ["int8_rowcol", "float8_rowwise"] if not args.small else ["int8_rowcol"]
    options = ["--seeds", "1", "--num-steps", "4" if args.small else "300"]
    options += [word for variant in variants for word in ("--variant", variant)]
    if args.checkpoint is not None:
        options += ["--checkpoint", str(args.checkpoint), "--data", str(args.data)]
    values = ["data.seq_len=256", "global_batch_size=8", "micro_batch_size=8", "optimizer.lr=1e-3"]
    values += ["data.eval_fraction=0.05", "eval_every_steps=300", "compile=block"]
    if args.small:
        values += ["data.seq_len=64", "data.max_rows=200", "compile=none", "eval_every_steps=4"]
    return [*options, *(word for value in values for word in ("--override", value))]


class Call:
    """The parts of a call, their results in one JSON file and their output in one log."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        """Renames files of an earlier call with the same name."""
        self.json_file, self.log = args.out / f"{name}.json", args.out / f"{name}.txt"
        _keep_earlier(self.json_file, self.log)
        self.content: dict[str, Any] = {"complete": False, "parts": {}}
        self._args, self._lock = args, threading.Lock()
        self._log_file = self.log.open("w", encoding="utf-8")
        self._write()

    def say(self, text: str) -> None:
        """Writes a line to the log and to stdout."""
        print(text, flush=True)
        with self._lock:
            self._log_file.write(text + "\n")
            self._log_file.flush()

    def run(self, name: str, limit_s: float) -> int:
        """Runs a part with a time limit; returns its exit code, or 124 if it was ended at the limit."""
        json_file = self._args.work / f"{name}.json"
        json_file.unlink(missing_ok=True)
        # A part normally ends by itself and says what is missing. The limit is for a part that hangs.
        command, more = part(name, self._args, json_file, max(limit_s - 15, 5) / 60)
        self.say(f"\n=== {name}, at most {limit_s:.0f} s: {' '.join(command[1:])}")
        started = time.monotonic()
        entry = self.content["parts"][name] = {"exit": None, "limit_s": limit_s, "results": None}
        self._write()
        process, cut = None, False
        try:
            with _signals_later():  # else one that comes within Popen leaves a part that nobody knows
                process = subprocess.Popen(
                    command,
                    env=_environment(self._args, more),
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    process_group=0,  # its own group, so that its child processes end with it
                )
            reader = threading.Thread(target=self._copy, args=(process,), daemon=True)
            reader.start()
            while process.poll() is None:
                time.sleep(0.5)
                self._take(entry, json_file)
                cut = time.monotonic() - started > limit_s
                if cut:
                    break
        finally:
            if process is not None:
                end_group(process)
        reader.join(5)
        assert process.stdout is not None
        process.stdout.close()
        self._take(entry, json_file)
        seconds = time.monotonic() - started
        entry |= {"exit": 124 if cut else process.returncode, "seconds": round(seconds, 1)}
        self._write()
        self.say(f"=== {name}: exit {entry['exit']} after {seconds:.0f} s")
        return int(entry["exit"])

    def finish(self) -> None:
        """Writes the end of the call, after all parts were run."""
        self.content["complete"] = True
        self._write()
        for name, entry in self.content["parts"].items():
            self.say(
                f"{name:<10} exit {entry['exit']}, {entry['seconds']:.0f} s of at most {entry['limit_s']:.0f}"
            )
        self.say(f"results: {self.json_file}, output: {self.log}")
        self._log_file.close()

    def _copy(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.say(line.rstrip("\n"))

    def _take(self, entry: dict[str, Any], json_file: Path) -> None:
        try:
            results = json.loads(json_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        if results != entry["results"]:
            entry["results"] = results
            self._write()

    def _write(self) -> None:
        partial = self.json_file.with_name(f".{self.json_file.name}")
        partial.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.json_file)


def _keep_earlier(*files: Path) -> None:
    """Renames call-1.json to call-1.before-1.json (or -2, -3 …), and call-1.txt likewise."""

    def earlier(file: Path) -> Path:
        return file.with_name(f"{file.stem}.before-{number}{file.suffix}")

    number = 1
    while any(earlier(file).exists() for file in files):
        number += 1
    for file in files:
        if file.exists():
            file.rename(earlier(file))


@contextmanager
def _signals_later() -> Iterator[None]:
    """Signals that end this program arrive after the block. They are not blocked, because a process that
    starts in the block would inherit that.
    """
    received = list[int]()
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, lambda got, _: received.append(got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in received:
            os.kill(os.getpid(), number)


def end_group(process: "subprocess.Popen[str]") -> None:
    """Ends a process and all processes in its group: first by SIGTERM, then by SIGKILL."""
    for sent, wait_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, sent)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and _group_lives(process.pid):
            process.poll()
            time.sleep(0.05)
    process.wait()


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _environment(args: argparse.Namespace, more: dict[str, str]) -> dict[str, str]:
    paths = [str(ROOT), str(HERE), str(args.work / "site"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"} | more


def _install(args: argparse.Namespace) -> None:
    """Installs the wheels and compiles them to bytecode, because torchao warns when it is first compiled."""
    wheels = [str(wheel) for wheel in sorted(args.wheels.glob("*.whl"))]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--upgrade"]
    subprocess.run([*pip, "--target", str(args.work / "site"), *wheels], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--call", type=int, choices=CALLS)
    which.add_argument("--part", choices=LIMITS_S)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_first"), help="where results go")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/gpu_first/work"), help="for what is thrown away"
    )
    parser.add_argument("--wheels", type=Path, help="install these wheels first")
    parser.add_argument("--checkpoint", type=Path, help="a Hugging Face folder for `quality`")
    parser.add_argument("--data", type=Path, help="rows for `quality`, with --checkpoint")
    parser.add_argument("--minutes", type=float, default=9.0, help="of a call")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if (args.checkpoint is None) != (args.data is None):
        parser.error("--checkpoint and --data go together")
    for number in (signal.SIGTERM, signal.SIGHUP):  # handled like Ctrl-C, so that the running part ends too
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    started = time.monotonic()
    for name in ("out", "work", "checkpoint", "data"):
        path = getattr(args, name)
        setattr(args, name, path and path.absolute())
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    if args.wheels:
        _install(args)
    args.small = args.small or not _has_gpu()
    names = CALLS[args.call] if args.call else (args.part,)
    call = Call(f"call-{args.call}" if args.call else args.part, args)
    codes = []
    for name in names:
        left_s = 60 * args.minutes - (time.monotonic() - started) - 10  # to end, and to write
        if left_s < 20:
            call.say(f"=== {name}: not run, the call's time is over")
            call.content["parts"][name] = {"exit": None, "limit_s": 0, "seconds": 0, "results": None}
            continue
        codes.append(call.run(name, min(left_s, LIMITS_S[name])))
    call.finish()
    return next((code for code in codes if code), 0)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
