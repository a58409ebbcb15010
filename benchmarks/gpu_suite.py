"""Runs all measurements that need a GPU, in calls of at most nine minutes, or one part at a time.

    python benchmarks/gpu_suite.py --call 1|2|3|4|5 [--out FOLDER] [--work FOLDER] [--small] …
    python benchmarks/gpu_suite.py --part NAME …

    call 1   first      three ops against the reference, GEMMs with clocks, quantizers    first.py
             first_3b   six steps of Llama 3.2 3B in bf16 and INT8, each with a profile   steps.py
             tests      the tests marked gpu
    call 2   3b         training steps of 3B, ours and then torchao's                     steps.py
    call 3   kernels    GEMMs and quantizers against their rooflines, ours and torch's    kernels.py
             8b         8B on one GPU, memory beside its plan                             steps.py
             quality    300 steps in bf16, INT8 and float8: held-out losses       lptune sweep
             variants   3B with other keys                                                steps.py
    call 4   linear     a linear layer in three kinds, then torchao's                     linear.py
             1b         training steps of 1B                                              steps.py
             block      a decoder block in every kind, then torchao's                     linear.py
             crossover  layer sizes from which a kind is faster than bf16                 crossover.py
             fsdp       one rank with and without FSDP2                                   fsdp.py
    call 5   llmq       Qwen2.5 7B as LLM.Q ran it: rows of 1,024, to stand beside its    steps.py
                        19.1k tokens/s in float8 and 13.8k in bf16 on an H100

The most important parts come first. It begins with what is missing on this machine. A part that cannot run
for that, and a label whose planned peak the card's memory cannot hold, are named and not run (exit code 2
for the first).

OUT/call-N.jsonl gets each row as soon as it is measured, OUT/call-N.json the results of every part within
half a second, OUT/call-N.txt the output with its tables. So whatever kills a call, at any moment, what was
measured is there. No network, checkpoint or data is needed.
--wheels FOLDER installs the wheels of that folder first, for this run only. --small (the default without a
GPU) runs the same commands with sizes that a CPU can finish.
"""

import argparse
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from planned import RESERVE_GIB, fits, peak_gib, settings  # benchmarks/planned.py

HERE = Path(__file__).parent
ROOT = HERE.parent
CALLS = {
    1: ("first", "first_3b", "tests"),
    2: ("3b",),
    3: ("kernels", "8b", "quality", "variants"),
    4: ("linear", "1b", "block", "crossover", "fsdp"),
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
    "fsdp": 120,
    "llmq": 540,
}
"""Each is also cut at what the call has left."""
STEPS = ("first_3b", "3b", "8b", "variants", "1b", "llmq")
"""Parts that steps.py runs, whose labels need memory that is planned."""
SMALL_STEPS = ["--preset", "llama3_2/tiny", "--override", "data.seq_len=64", "--override", "compile=none"]
KINDS = ("int8_rowcol", "float8_rowwise", "float8_tensorwise")
NEEDS: dict[str, tuple[str, str, str | None]] = {
    **{name: (name, "", None) for name in ("torch", "numpy", "omegaconf", "safetensors", "tokenizers")},
    **{name: (name, "", None) for name in ("huggingface_hub", "jinja2", "click", "tqdm")},
    "yaml": ("PyYAML", "", None),
    **{name: (name, "tests", None) for name in ("pytest", "pluggy", "iniconfig", "pygments", "packaging")},
    "hypothesis": ("hypothesis", "tests", "leaves out the files that import it"),
    "sortedcontainers": ("sortedcontainers", "tests", "leaves out the files that import hypothesis"),
    "xdist": ("pytest-xdist", "tests", "runs one test at a time, and may not finish"),
    "execnet": ("execnet", "tests", "runs one test at a time, and may not finish"),
    "torchao": ("torchao", "3b 1b linear block", "has no rows of torchao"),
}
"""Module -> (wheel, parts that need it, what they do without it). No part: all; None: they do not run."""


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
    if name == "fsdp":
        tiny = ["--preset", "llama3_2/tiny", "--seq-len", "64", "--steps", "3", "--compile", "none"]
        return script("fsdp.py", "--profile", *(tiny if small else []))
    if name == "quality":
        # Autotuning would take longer than these small steps.
        return Part(
            ["bash", "-ec", _sweep(shlex.quote(str(work / "quality")), small)], {"LPTUNE_AUTOTUNE": "0"}
        )
    setting, labels = settings(name, args.card_gib)
    options = ["--work", str(work / "steps"), *until]
    if small:
        labels = [*labels[:2], *(["torchao int8_rowcol"] if name == "3b" and not missing("3b") else [])]
        options += SMALL_STEPS
    else:
        labels = [label for label in labels if fits(setting, label, args.card_gib)]
        options += ["--preset", setting.preset, *_each("--override", setting.overrides)]
    if name == "first_3b":
        options += ["--timed", "2", *_each("--profile", labels)]
    return script("steps.py", *options, *_each("--label", labels))


def _each(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def missing(part: str | None = None) -> list[str]:
    """The modules of NEEDS that are not installed here, all or those that `part` needs."""

    def needed(module: str) -> bool:
        parts = NEEDS[module][1]
        return part is None or not parts or part in parts.split()

    return [each for each in NEEDS if needed(each) and importlib.util.find_spec(each) is None]


def lacks() -> Iterator[str]:
    """A line for each package that this machine lacks, and for what it needs to compile."""
    for module in missing():
        wheel, parts, without = NEEDS[module]
        effect = f"{parts or 'every part'} {without or 'cannot run'}"
        yield f"missing: {wheel}; {effect} until its wheel is in --wheels"
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        yield "missing: a C compiler, without which Triton starts no kernel; install gcc"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        yield f"missing: {header}, without which Triton starts no kernel; install the headers of this Python"


def stopped_by(name: str) -> list[str]:
    """The packages without which a part cannot run and that are missing here."""
    return [NEEDS[module][0] for module in missing(name) if NEEDS[module][2] is None]


def why_not(name: str, args: argparse.Namespace) -> str | None:
    """Why a part cannot run on this machine; None if it can."""
    if packages := stopped_by(name):
        return f"missing: {', '.join(packages)}"
    if not args.small and name in STEPS:
        setting, labels = settings(name, args.card_gib)
        if not any(fits(setting, label, args.card_gib) for label in labels):
            return "no label fits the card's memory"
    return None


def unfit(name: str, card_gib: float) -> Iterator[str]:
    """A line for each label of a part whose planned peak the card cannot hold."""
    setting, labels = settings(name, card_gib)
    for label in labels:
        if not fits(setting, label, card_gib):
            planned = f"planned are {peak_gib(setting, label)} GiB and {RESERVE_GIB} in reserve"
            yield f"{name}, {label}: not run, {planned}, and the card has {card_gib:.1f}"


def _tests(args: argparse.Namespace, json_file: Path) -> Part:
    # Only files with GPU tests, because each worker collects all files that it gets.
    texts = {path: path.read_text("utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    files = [str(path) for path, text in texts.items() if "mark.gpu" in text]
    lacking, imports = missing("tests"), re.compile("^(from|import) hypothesis", re.MULTILINE)
    if {"hypothesis", "sortedcontainers"} & set(lacking):
        files = [file for file in files if not imports.search(texts[Path(file)])]
    options = ["-q", "-m", "gpu", "-W", "default", "--continue-on-collection-errors"]
    options += ["-p", "no:cacheprovider", "-p", "pytest_results", "-p", "no:benchmark"]
    # One thread each: the workers of xdist are threads enough, and the server that tests fork needs it.
    environment = {"LPTUNE_TEST_RESULTS": str(json_file), "LPTUNE_AUTOTUNE": "0", "OMP_NUM_THREADS": "1"}
    if not {"xdist", "execnet"} & set(lacking):
        options += ["-n", "2" if args.small else "12"]
    if args.small:  # only the tests of the recipe also run on a CPU
        files = [str(ROOT / "tests" / "recipes" / "test_on_gpu.py")]
        options += ["-k", "int8_rowcol"]
        environment["LPTUNE_GPU_TESTS_ON"] = "cpu"
    return Part([sys.executable, "-m", "pytest", *options, *files], environment)


def _sweep(folder: str, small: bool) -> str:
    """The commands that train a small random model in each kind, of which the last one prints a table."""
    lptune, checkpoint = f"{shlex.quote(sys.executable)} -m lptune", f"{folder}/checkpoint"
    kinds, steps = ("none,int8_rowcol", 4) if small else ("none,int8_rotated,int8_rowcol,float8_rowwise", 300)
    keys = f"model.path={checkpoint} data.source=builtin precision.kind={kinds} num_steps={steps} "
    keys += f"eval_every_steps={steps} data.eval_fraction=0.05 global_batch_size=8 micro_batch_size=8 "
    keys += "optimizer.lr=1e-3 checkpoint.at_end=false export.enabled=false "
    keys += "data.seq_len=64 data.max_rows=200 compile=none" if small else "data.seq_len=256 compile=block"
    sweep = f"{lptune} sweep full_finetune --config llama3_2/1b {keys} --output-dir {folder}/runs"
    return f"[ -d {checkpoint} ] || {lptune} new-checkpoint llama3_2/quickstart {checkpoint}\n{sweep}"


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

    def skip(self, name: str, why: str) -> None:
        """Says and writes why a part is not run."""
        self.say(f"\n=== {name}: not run, {why}")
        self.content["parts"][name] = {
            "exit": None,
            "limit_s": 0,
            "seconds": 0,
            "results": None,
            "not_run": why,
        }
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
    of_all = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    return os.environ | of_all | more


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
    parser.add_argument("--minutes", type=float, default=9.0, help="of a call")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):  # handled like Ctrl-C, so that the running part ends too
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    started = time.monotonic()
    args.out, args.work = args.out.absolute(), args.work.absolute()
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    if args.wheels:
        _install(args)
    sys.path.insert(0, str(args.work / "site"))
    importlib.invalidate_caches()
    names = CALLS[args.call] if args.call else (args.part,)
    call = Call(f"call-{args.call}" if args.call else args.part, args)
    for line in lacks():
        call.say(line)
    args.card_gib = card_gib()
    if args.card_gib:
        call.say(f"the card has {args.card_gib:.1f} GiB")
    else:
        args.small = True
        call.say("no GPU: the small form, whose times say nothing")
    codes = []
    for name in names:
        if name in STEPS and not args.small:
            for line in unfit(name, args.card_gib):
                call.say(line)
        why = why_not(name, args)
        if why is not None:
            call.skip(name, why)
            codes.append(2 if stopped_by(name) else 0)
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
    if importlib.util.find_spec("torch") is None:
        return 0.0
    code = (
        "import torch; print(torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1].replace("False", "0")) / 2**30


if __name__ == "__main__":
    sys.exit(main())
