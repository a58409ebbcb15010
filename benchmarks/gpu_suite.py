"""Runs all measurements that need a GPU, in calls of at most nine minutes, or one part at a time.

    python benchmarks/gpu_suite.py [--call 1 2 3 4 5] [--out FOLDER] [--work FOLDER] [--small] …
    python benchmarks/gpu_suite.py --part NAME …

    call 1   first      three ops against the reference, GEMMs with clocks, quantizers    first.py
             first_3b   six steps of Llama 3.2 3B in bf16 and INT8, each with a profile   steps.py
             tests      the tests marked gpu
    call 2   3b         training steps of 3B, ours and then torchao's                     steps.py
    call 3   kernels    GEMMs and quantizers against their rooflines, ours and torch's    kernels.py
             8b         8B on one GPU, memory beside its plan                             steps.py
             quality    300 steps in bf16, INT8 and float8: held-out losses               training.py
             variants   3B with trial settings (LPTUNE_TRY, keys)                         steps.py
    call 4   linear     a linear layer in three kinds, then torchao's                     linear.py
             1b         training steps of 1B                                              steps.py
             block      a decoder block in every kind, then torchao's                     linear.py
             crossover  layer sizes from which a kind is faster than bf16                 crossover.py
    call 5   llmq       Qwen2.5 7B as LLM.Q ran it: rows of 1,024, to stand beside its    steps.py
                        19.1k tokens/s in float8 and 13.8k in bf16 on an H100

The most important parts come first. A label whose planned peak the card's memory cannot hold is named and
not run. A part that fails ends neither the call nor the other parts.

OUT/call-N.jsonl gets each row as soon as it is measured, OUT/call-N.json the results of every part within
half a second, OUT/call-N.txt the output with its tables. So whatever kills a call, at any moment, what was
measured is there. No network, checkpoint or data is needed; --checkpoint and --data give `quality` real ones.
--small (the default without a GPU) runs the same commands with sizes that a CPU can finish.
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
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from planned import RESERVE_GIB, fits, peak_gib, settings  # benchmarks/planned.py

HERE = Path(__file__).parent
ROOT = HERE.parent
CALLS = {
    1: ("first", "first_3b", "tests"),
    2: ("3b",),
    3: ("kernels", "8b", "quality", "variants"),
    4: ("linear", "1b", "block", "crossover"),
    5: ("llmq",),
}
LIMITS_S = {
    "first": 120,
    "first_3b": 180,
    "tests": 330,  # with 8 workers an H100 had run 485 of 513 tests after 245 s
    "3b": 540,
    "kernels": 130,
    "8b": 190,
    "quality": 110,
    "variants": 300,
    "linear": 150,
    "1b": 180,
    "block": 80,
    "crossover": 120,
    "llmq": 540,
}
"""Each is also cut at what the call has left."""
STEPS = ("first_3b", "3b", "8b", "variants", "1b", "llmq")
"""Parts that steps.py runs, whose labels need memory that is planned."""
SMALL_STEPS = ["--preset", "llama3_2/tiny", "--override", "data.seq_len=64", "--override", "compile=none"]
KINDS = ("int8_rowcol", "float8_rowwise", "float8_tensorwise")


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
    if name == "first":
        return script("first.py", *(["--shape", "256", "128", "192"] if small else []))
    if name == "kernels":
        return script("kernels.py", *(["--shape", "256", "256", "256"] if small else []), *until)
    if name == "linear":
        sizes = ["--shape", "64", "64", "64"] if small else ["--rounds", "5"]
        kinds = KINDS[:1] if small else KINDS
        return script("linear.py", "--mode", "compiled", *sizes, *_each("--kind", kinds), *until)
    if name == "block":
        tiny = ["llama3_2/tiny", "--tokens", "64", "--kind", "int8_rowcol", "--rounds", "2"]
        sizes = tiny if small else ["llama3_2/3b"]
        return script("linear.py", "--mode", "compiled", "--block", *sizes, *until)
    if name == "crossover":
        if small:
            return script("crossover.py", "--sizes", "64", "--kind", "int8_rowcol", "--dry-run", *until)
        return script("crossover.py", *_each("--kind", KINDS[:2]), "--rounds", "3", "--dry-run", *until)
    if name == "quality":
        # Autotuning would take longer than these small steps.
        made = script("training.py", *_quality(args), "--out", str(work / "quality"), *until)
        return made._replace(environment={"LPTUNE_AUTOTUNE": "0"})
    setting, labels = settings(name, args.card_gib)
    options = ["--work", str(work / "steps"), *until]
    if small:
        has_torchao = importlib.util.find_spec("torchao") is not None
        labels = [*labels[:2], *["torchao int8_rowcol"] * (name == "3b" and has_torchao)]
        options += SMALL_STEPS
    else:
        labels = [label for label in labels if fits(setting, label, args.card_gib)]
        options += ["--preset", setting.preset, *_each("--override", setting.overrides)]
    if name == "first_3b":
        options += ["--timed", "2", *_each("--profile", labels)]
    return script("steps.py", *options, *_each("--label", labels))


def _each(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def has_room(name: str, card_gib: float) -> bool:
    """Whether the card holds any label of a part; a part without labels needs little."""
    if name not in STEPS:
        return True
    setting, labels = settings(name, card_gib)
    return any(fits(setting, label, card_gib) for label in labels)


def unfit(name: str, card_gib: float) -> Iterator[str]:
    """A line for each label of a part whose planned peak the card cannot hold."""
    setting, labels = settings(name, card_gib)
    for label in labels:
        if not fits(setting, label, card_gib):
            planned = f"planned are {peak_gib(setting, label)} GiB and {RESERVE_GIB} in reserve"
            yield f"{name}, {label}: not run, {planned}, and the card has {card_gib:.1f}"


def _tests(args: argparse.Namespace, json_file: Path) -> Part:
    # Only files with GPU tests, because each worker collects all files that it gets.
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [str(path) for path in paths if "mark.gpu" in path.read_text("utf-8")]
    options = ["-q", "-m", "gpu", "-W", "default", "--continue-on-collection-errors"]
    options += ["-p", "no:cacheprovider", "-p", "pytest_results", "-p", "no:benchmark"]
    # One thread each: the workers of xdist are threads enough, and the server that tests fork needs it.
    environment = {"LPTUNE_TEST_RESULTS": str(json_file), "LPTUNE_AUTOTUNE": "0", "OMP_NUM_THREADS": "1"}
    options += ["-n", "2" if args.small else "12"]
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
        self.json_file, self.rows, self.log = (args.out / f"{name}.{end}" for end in ("json", "jsonl", "txt"))
        _keep_earlier(self.json_file, self.rows, self.log)
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
        more = more | {"BENCHMARK_ROWS": str(self.rows), "BENCHMARK_PART": name}
        self.say(f"\n=== {name}, at most {limit_s:.0f} s: {' '.join(command[1:])}")
        started = time.monotonic()
        entry = self.content["parts"][name] = {"exit": None, "limit_s": limit_s, "results": None}
        self._write()
        paths = os.pathsep.join(filter(None, [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]))
        cut = False
        process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"} | more,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,  # its own group, so that its child processes end with it
        )
        try:
            reader = threading.Thread(target=self._copy, args=(process,), daemon=True)
            reader.start()
            while process.poll() is None:
                time.sleep(0.5)
                self._take(entry, json_file)
                cut = time.monotonic() - started > limit_s
                if cut:
                    break
        finally:
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

    def skip(self, name: str, why: str) -> None:
        """Says and writes why a part is not run."""
        self.say(f"\n=== {name}: not run, {why}")
        self.content["parts"][name] = {"exit": None, "results": None, "not_run": why}
        self._write()

    def finish(self) -> None:
        """Writes the end of the call, after all parts were run."""
        self.content["complete"] = True
        self._write()
        for name, entry in self.content["parts"].items():
            if "not_run" in entry:
                self.say(f"{name:<10} not run: {entry['not_run']}")
                continue
            seconds, limit_s = entry["seconds"], entry["limit_s"]
            self.say(f"{name:<10} exit {entry['exit']}, {seconds:.0f} s of at most {limit_s:.0f}")
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


def end_group(process: "subprocess.Popen[str]") -> None:
    """Ends a process and all processes in its group: first by SIGTERM, then by SIGKILL."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with suppress(subprocess.TimeoutExpired):
            process.wait(3)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--call", type=int, nargs="+", choices=CALLS, default=[*CALLS], help="all by default")
    parser.add_argument("--part", choices=LIMITS_S, help="this part alone")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_first"), help="where results go")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/gpu_first/work"), help="for what is thrown away"
    )
    parser.add_argument("--checkpoint", type=Path, help="a Hugging Face folder for `quality`")
    parser.add_argument("--data", type=Path, help="rows for `quality`, with --checkpoint")
    parser.add_argument("--minutes", type=float, default=9.0, help="of a call")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if (args.checkpoint is None) != (args.data is None):
        parser.error("--checkpoint and --data go together")
    for number in (signal.SIGTERM, signal.SIGHUP):  # handled like Ctrl-C, so that the running part ends too
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    for name in ("out", "work", "checkpoint", "data"):
        path = getattr(args, name)
        setattr(args, name, path and path.absolute())
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    args.card_gib = card_gib()
    args.small |= not args.card_gib
    if args.part:
        return run_parts(args.part, [args.part], args)
    codes = [run_parts(f"call-{number}", CALLS[number], args) for number in args.call]
    return next((code for code in codes if code), 0)


def run_parts(call_name: str, names: Sequence[str], args: argparse.Namespace) -> int:
    """Runs the parts of a call in its time; returns the first exit code that is not 0."""
    started, codes = time.monotonic(), list[int]()
    call = Call(call_name, args)
    if args.card_gib:
        call.say(f"the card has {args.card_gib:.1f} GiB")
    else:
        call.say("no GPU: the small form, whose times say nothing")
    for name in names:
        if name in STEPS and not args.small:
            for line in unfit(name, args.card_gib):
                call.say(line)
        if not args.small and not has_room(name, args.card_gib):
            call.skip(name, "no label fits the card's memory")
            continue
        left_s = 60 * args.minutes - (time.monotonic() - started) - 10  # to end, and to write
        if left_s < 20:
            call.skip(name, "the call's time is over")
            continue
        codes.append(call.run(name, min(left_s, LIMITS_S[name])))
    call.finish()
    return next((code for code in codes if code), 0)


def card_gib() -> float:
    """The memory of the GPU in GiB, 0 without one. A process of its own asks, since whoever asks keeps half a
    GiB of it for the CUDA context.
    """
    code = (
        "import torch; print(torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1].replace("False", "0")) / 2**30


if __name__ == "__main__":
    sys.exit(main())
