"""Whether two commits train the same bits: losses, gradient norms and weights of many tiny runs.

    python -m tests.proofs.bits --write before.json     # before a change; another commit: --checkout FOLDER
    python -m tests.proofs.bits --compare before.json   # after it: exit code 1 if a bit differs
    python -m tests.proofs.bits --quick --compare before.json       # one eager run of each kind: seconds
    python -m tests.proofs.bits --only 'int8.*/eager/2' --compare before.json

A refactoring changes no bit. Each run trains a Llama of two blocks for six steps through `lptune run`, so any
change between the command line and the kernels shows. Losses, evaluations and gradient norms are compared as
float64 numbers, the exported weights by their SHA-256. A run's name is
KIND/(eager | compiled)/RANKS/(reshard | keep)[/what else]; `--list` prints all names.

Bits depend on torch and on the processor: `--compare` refuses a file that was written with others. The file
must hold every run that is compared.

The program calls the command line alone and imports no other module of the tests. So it runs any commit: that
of the `lptune` which Python finds, or of `--checkout`. Every run is a fork of this process, which has
imported torch; ranks are forks with the variables that torchrun would set. Each call has new caches. Where
TORCHINDUCTOR_CACHE_DIR is set, compiled C++ is kept there for the next call.
"""

import argparse
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import platform
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

KINDS = (
    "none", "int8_rowcol", "int8_rotated", "int8_tensorwise", "float8_tensorwise", "float8_delayed",
    "float8_rowwise", "float8_rowwise_with_gw_hp", "float8_blockwise", "mxfp8", "nvfp4", "int8_weight_only",
    "int4_weight", "bitnet",
)  # fmt: skip
NUMBERS = ("num_target_tokens", "lr", "loss", "grad_norm", "eval_loss")
"""What is compared of each step, in the order in which a step has them."""
TIME_LIMIT_S = 1200.0
_GRACE_S = 10.0  # what is left to the other ranks once one has failed


class Stage(NamedTuple):
    """One call of `lptune run`."""

    ranks: int
    keys: tuple[str, ...]


class Case(NamedTuple):
    """A run, of several stages where it is stopped and resumed."""

    name: str
    preset: str
    stages: tuple[Stage, ...]


def cases() -> list[Case]:
    """All of them: the product of kind, mode, ranks and resharding, and what else changes the computation."""
    found = []
    product = itertools.product(KINDS, ("eager", "compiled"), (1, 2), ("reshard", "keep"))
    for kind, mode, ranks, after in sorted(product, key=lambda values: (values[1] != "eager", values[2])):
        found.append(_case(kind, mode, ranks, after))
    rowcol = "int8_rowcol"
    for more, keys in {
        "stochastic": ("precision.stochastic_rounding=true",),
        "requantized": ("precision.grad_input=requantized",),
        "column": ("precision.grad_input=column", "precision.all_gather=high"),
        "folded": ("precision.grad_weight=folded",),
        "output_high": ("precision.output=high",),
        "grad_input_high": ("precision.grad_input=high",),
        "grad_weight_high": ("precision.grad_weight=high",),
        "skip": ("precision.skip=[lm_head,*.o_proj]",),
        "float32": ("compute_dtype=float32",),
        "selective": ("activation_checkpointing=selective",),
        "full": ("activation_checkpointing=full",),
        "no_clipping": ("max_grad_norm=0",),
        "one_micro_batch": ("micro_batch_size=4",),
        "not_packed": ("data.packing=false", "data.train_on_prompt=true"),
        "seed": ("seed=1", "schedule.kind=cosine"),
    }.items():
        found.append(_case(rowcol, more=more, keys=keys))
    found += [
        _case("none", more="float32", keys=("compute_dtype=float32",)),
        _case("float8_tensorwise", more="e4m3", keys=("precision.grad_format=e4m3",)),
        _case("float8_tensorwise", more="stochastic", keys=("precision.stochastic_rounding=true",)),
        _case("float8_rowwise", more="stochastic", keys=("precision.stochastic_rounding=true",)),
        _case(rowcol, "compiled", more="selective", keys=("activation_checkpointing=selective",)),
        _case(rowcol, "compiled", more="stochastic", keys=("precision.stochastic_rounding=true",)),
        _case(rowcol, "compiled", more="model", keys=("compile=model",)),
    ]
    for preset in ("llama3_2/tiny", "gemma2/tiny", "qwen3/tiny", "phi4/tiny"):
        found.append(_case(rowcol, more=preset.partition("/")[0], preset=preset))
    for more, keys in {
        "micro_batches": ("micro_batch_size=1",),
        "reduced_each": ("micro_batch_size=1", "parallel.reduce_every_micro_batch=true"),
        "stochastic": ("micro_batch_size=1", "precision.stochastic_rounding=true"),
        "gather_high": ("precision.all_gather=high",),
        "requantized": ("precision.grad_input=requantized",),
        "replicate": ("parallel.replicate=2",),
        "prefetch": ("parallel.prefetch_blocks=1",),
        "tensor": ("parallel.tensor=2",),
        "tensor_folded": ("parallel.tensor=2", "precision.grad_weight=folded"),
        "tensor_folded_high": (
            "parallel.tensor=2", "precision.grad_weight=folded", "precision.tp_all_gather=high",
        ),
        "tensor_tokens_whole": ("parallel.tensor=2", "parallel.sequence=false"),
    }.items():  # fmt: skip
        found.append(_case(rowcol, ranks=2, more=more, keys=keys))
    for kind in ("none", "float8_tensorwise", "int8_weight_only"):
        found.append(_case(kind, ranks=2, more="tensor", keys=("parallel.tensor=2",)))
    found.append(_case("float8_delayed", ranks=2, more="micro_batches", keys=("micro_batch_size=1",)))
    found.append(_case("float8_tensorwise", "compiled", 2, more="tensor", keys=("parallel.tensor=2",)))
    mesh = ("parallel.tensor=2", "precision.grad_weight=folded")
    found.append(_case(rowcol, ranks=4, more="tensor_folded", keys=mesh))
    for kind, before, after in (
        ("none", 1, 1), ("float8_delayed", 1, 1), ("int8_weight_only", 1, 1), (rowcol, 2, 1),
    ):  # fmt: skip
        whole = _case(kind, ranks=after, more=f"resumed_from_{before}")
        first = Stage(before, (*whole.stages[0].keys, "num_steps=3"))
        found.append(whole._replace(stages=(first, *whole.stages)))
    return found


def _case(
    kind: str,
    mode: str = "eager",
    ranks: int = 1,
    after: str = "reshard",
    *,
    more: str = "",
    keys: Sequence[str] = (),
    preset: str = "llama3_1/tiny",
) -> Case:
    own = [f"precision.kind={kind}", f"parallel.reshard_after_forward={str(after == 'reshard').lower()}"]
    own += ["precision.emulate=true"] * kind.startswith(("float8", "mx"))
    own += ["compile=block"] * (mode == "compiled")
    name = "/".join(filter(None, (kind, mode, str(ranks), after, more)))
    return Case(name, preset, (Stage(ranks, (*own, *keys)),))


def is_quick(case: Case) -> bool:
    """One eager run of each kind on one rank."""
    return re.fullmatch(r"\w+/eager/1/reshard", case.name) is not None


# ---- running


class Folder:
    """Where the runs happen: inputs, caches, one folder for each run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Short documents of many lengths, several to a row. The rows are this program's own, so that a change
        # of the built-in data is no change of bits.
        rows = (
            {"prompt": f"What is {a} plus {b}?" + " Please." * (a % 3), "response": f"It is {a + b}." * b}
            for a, b in itertools.product(range(60), range(1, 4))
        )
        self.rows = path / "rows.jsonl"
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def checkpoint(self, preset: str) -> Path:
        """Random weights of `preset`, made on first use."""
        made = self.path / "checkpoints" / preset
        if not made.is_dir():
            made.parent.mkdir(parents=True, exist_ok=True)
            running = Running(
                self, ["new-checkpoint", preset, str(made)], 1, self.path / f"new_{made.parent.name}"
            )
            while not running.is_done():
                time.sleep(0.02)
            if running.failure():
                sys.exit(f"lptune new-checkpoint {preset}: {running.failure()}")
        return made

    def config(self, case: Case) -> dict[str, Any]:
        """What all runs have in common."""
        return {
            "model": {"path": str(self.checkpoint(case.preset))},
            "data": {"source": str(self.rows), "seq_len": 64, "eval_fraction": 0.1},
            "precision": {"skip": [] if case.preset != "llama3_2/tiny" else ["lm_head"]},
            "optimizer": {"lr": 3e-3, "weight_decay": 0.1},
            "schedule": {"kind": "constant", "warmup_steps": 2},
            "compute_dtype": "bfloat16",
            "compile": "none",
            "activation_checkpointing": "none",
            "device": "cpu",
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "num_steps": 6,
            "eval_every_steps": 3,
        }

    def environment(self) -> dict[str, str]:
        """Nothing of a launcher or a developer; one thread, so that sums are taken in one order."""
        dropped = ("LPTUNE_", "TORCHELASTIC_", "PET_", "HF_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            kept.pop(name, None)
        return kept | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "XDG_CACHE_HOME": str(self.path / "cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            # Its key does not cover what tensor subclasses do, so one commit would run another's graph.
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        }


class Running:
    """`lptune ARGUMENTS` on some ranks, each a fork of this process."""

    def __init__(self, folder: Folder, arguments: Sequence[str], ranks: int, output: Path) -> None:
        self._output, self._deadline = output, time.monotonic() + TIME_LIMIT_S
        output.mkdir(parents=True, exist_ok=True)
        port = _free_port() if ranks > 1 else 0
        self._codes: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        for rank in range(ranks):
            variables = _rank_variables(rank, ranks, port) if ranks > 1 else {}
            self._pids[rank] = _fork(arguments, folder.environment() | variables, output, rank)

    def is_done(self) -> bool:
        """Whether all ranks have ended; ends those that wait for one that failed, or take too long."""
        for rank in self._pids.keys() - self._codes.keys():
            pid, status = os.waitpid(self._pids[rank], os.WNOHANG)
            if pid:
                self._codes[rank] = os.waitstatus_to_exitcode(status)
                if self._codes[rank]:
                    self._deadline = min(self._deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > self._deadline:
            self.kill()
        return len(self._codes) == len(self._pids)

    def kill(self) -> None:
        """Ends what still runs."""
        for rank in self._pids.keys() - self._codes.keys():
            os.kill(self._pids[rank], signal.SIGKILL)
            _, status = os.waitpid(self._pids[rank], 0)
            self._codes[rank] = os.waitstatus_to_exitcode(status)

    def failure(self) -> str:
        """The worst exit code and the last line that its rank printed; empty where all returned 0."""
        rank = max(
            self._codes, key=lambda rank: (self._codes[rank] != 0, self._codes[rank] != -signal.SIGKILL)
        )
        if not any(self._codes.values()):
            return ""
        lines = (self._output / f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace").split("\n")
        return f"exit code {self._codes[rank]}: " + next((line for line in reversed(lines) if line), "")


def _fork(arguments: Sequence[str], environment: dict[str, str], output: Path, rank: int) -> int:
    """The process id of `lptune ARGUMENTS` in the folder `output`."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        log = os.open(output / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(output)
        os.environ.clear()
        os.environ.update(environment)
        importlib.import_module("lptune.cli.main").main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Job:
    """A case while it runs, one stage after the other."""

    def __init__(self, folder: Folder, case: Case) -> None:
        self.case, self._folder, self._stages = case, folder, list(case.stages)
        self._started, self._path = time.monotonic(), folder.path / "runs" / case.name.replace("/", "_")
        self._path.mkdir(parents=True)
        config = json.dumps(folder.config(case))  # JSON is YAML
        (self._path / "config.yaml").write_text(config, encoding="utf-8")
        self._next()

    def _next(self) -> None:
        stage = self._stages.pop(0)
        command = ["run", "full_finetune", "--config", str(self._path / "config.yaml"), "output_dir=run"]
        self.running = Running(self._folder, [*command, *stage.keys], stage.ranks, self._path)

    def is_done(self) -> bool:
        """Whether its last stage has ended, or one that failed."""
        if not self.running.is_done():
            return False
        if self._stages and not self.running.failure():
            self._next()
            return False
        return True

    def result(self) -> dict[str, Any]:
        """What is compared; the run's folder is removed."""
        failure, run = self.running.failure(), self._path / "run"
        result: dict[str, Any] = {"failure": failure, "seconds": round(time.monotonic() - self._started, 1)}
        if not failure:
            lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            records = [json.loads(line) for line in lines]
            result["steps"] = [
                {"step": record["step"]}
                | {name: record[name] for name in NUMBERS if record.get(name) is not None}
                for record in records
            ]
            result["weights"] = weights(run / "export")
            shutil.rmtree(self._path)
        return result


def weights(folder: Path) -> dict[str, str]:
    """Tensor -> SHA-256 of its dtype, shape and bytes, in all safetensors files of a folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        for name, entry in json.loads(content[8 : 8 + size]).items():
            if name != "__metadata__":
                start, end = (8 + size + offset for offset in entry["data_offsets"])
                text = f"{entry['dtype']} {entry['shape']} ".encode()
                found[name] = hashlib.sha256(text + content[start:end]).hexdigest()
    return found


def preload(checkout: Path, cache: Path, *, compiles: bool) -> None:
    """Imports what every run imports, and lets torch find the C++ compiler. cache: of what torch compiles."""
    os.environ["OMP_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    sys.path.insert(0, str(checkout))
    os.environ["PYTHONPATH"] = str(checkout)
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    torch.set_num_threads(1)
    for name in ("cli.main", "checkpoint", "data", "distributed", "linear", "models", "training"):
        importlib.import_module(f"lptune.{name}")
    found = Path(str(sys.modules["lptune"].__file__)).resolve()
    assert found.is_relative_to(checkout.resolve()), f"lptune comes from {found}"
    # In a build for GPUs autograd starts threads, which no fork keeps.
    if compiles and torch.version.cuda is None and torch.version.hip is None:
        torch.hub.tqdm.monitor_interval = 0  # its progress bars are watched by a thread
        torch.compile(lambda x, y: (x * y).relu() + x)(torch.ones(8), torch.ones(8, requires_grad=True))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


def facts(checkout: Path) -> dict[str, str]:
    """What bits may depend on, and the commit."""
    import torch

    git = subprocess.run(
        ["git", "-C", checkout, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    cpu = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), cpu)
    return {
        "commit": git.stdout.strip() or "unknown",
        "torch": torch.__version__,
        "cpu": f"{cpu}, {torch.backends.cpu.get_cpu_capability()}",
    }


def run_all(folder: Folder, chosen: Sequence[Case], num_jobs: int) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Each case and what came out, in the order in which they end; at most `num_jobs` ranks at once, or one
    case of more.
    """
    waiting, running = list(chosen), list[Job]()
    try:
        while waiting or running:
            free = num_jobs - sum(_ranks(job.case) for job in running)
            while waiting and (_ranks(waiting[0]) <= free or not running):
                case = waiting.pop(0)
                running.append(Job(folder, case))
                free -= _ranks(case)
            for job in running:
                if job.is_done():
                    running.remove(job)
                    yield job.case, job.result()
                    break
            else:
                time.sleep(0.02)
    finally:
        for job in running:
            job.running.kill()


def _ranks(case: Case) -> int:
    return max(stage.ranks for stage in case.stages)


# ---- comparing


def difference(was: dict[str, Any], now: dict[str, Any]) -> str:
    """The first value that differs, in the order of the computation; empty where all are equal."""
    if was["failure"] or now["failure"]:
        return f"{now['failure'] or 'no failure'} (was {was['failure'] or 'no failure'})"
    for before, after in itertools.zip_longest(was.get("steps", ()), now.get("steps", ()), fillvalue={}):
        step = (after or before)["step"]
        for name in ("step", *NUMBERS):
            if before.get(name) != after.get(name):
                return f"step {step}: {name} {after.get(name)!r} (was {before.get(name)!r})"
    for name in sorted(was["weights"].keys() | now["weights"].keys()):
        digests = [each["weights"].get(name, "missing")[:12] for each in (now, was)]
        if digests[0] != digests[1]:
            return f"weight {name} {digests[0]} (was {digests[1]})"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep what came out")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="with what was kept")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="a regular expression found in the name"
    )
    parser.add_argument("--quick", action="store_true", help="one eager run of each kind on one rank")
    parser.add_argument("--checkout", type=Path, help="the commit's files; else the lptune that Python finds")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the names of the runs")
    options = parser.parse_args(arguments)
    chosen = [case for case in cases() if re.search(options.only, case.name)]
    chosen = [case for case in chosen if is_quick(case) or not options.quick]
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if not chosen or not (options.write or options.compare):
        parser.error("no run has such a name" if not chosen else "--write FILE, --compare FILE or both")
    kept = json.loads(options.compare.read_text(encoding="utf-8")) if options.compare else None
    spec = importlib.util.find_spec("lptune")
    checkout = options.checkout or Path(str(spec and spec.origin)).parents[1]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lptune-bits-") as path:
        folder = Folder(Path(path))
        compiles = any("/compiled/" in case.name for case in chosen)
        preload(checkout, folder.path / "inductor", compiles=compiles)
        of = facts(checkout)
        print(f"{len(chosen)} runs of {of['commit']}", f"against {kept['of']['commit']}" if kept else "")
        if kept and (other := [name for name in ("torch", "cpu") if kept["of"][name] != of[name]]):
            print(*(f"{options.compare}: {kept['of'][name]}, here {of[name]}" for name in other), sep="\n")
            return 2
        found, differing = dict[str, dict[str, Any]](), list[str]()
        for name, result in _results(folder, chosen, options.jobs):
            found[name], wrong = result, result["failure"]
            if kept is not None:
                before = kept["runs"].get(name)
                wrong = wrong or (difference(before, result) if before else f"not in {options.compare}")
            differing += [name] * bool(wrong)
            print(_row(name, result, wrong, compared=kept is not None), flush=True)
    if options.write:
        content = {"of": of, "runs": dict(sorted(found.items()))}
        options.write.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    verdict = (
        f"{len(differing)} differ or fail: {', '.join(differing)}" if differing else "none differs or fails"
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = f"{used.ru_utime + used.ru_stime:.0f} s of CPU time"
    print(f"{len(found)} in {time.monotonic() - started:.0f} s, {cpu}: {verdict}")
    return int(bool(differing))


def _results(folder: Folder, chosen: Sequence[Case], num_jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The weights that the runs start from, then the runs."""
    for preset in dict.fromkeys(case.preset for case in chosen):
        yield preset, {"failure": "", "seconds": 0.0, "weights": weights(folder.checkpoint(preset))}
    for case, result in run_all(folder, chosen, num_jobs):
        yield case.name, result


def _row(name: str, result: dict[str, Any], wrong: str, *, compared: bool) -> str:
    """Seconds, name, the last loss, a digest of all weights, and what differs."""
    loss = next((step["loss"] for step in reversed(result.get("steps", ())) if "loss" in step), "")
    digest = hashlib.sha256(json.dumps(result.get("weights"), sort_keys=True).encode()).hexdigest()[:12]
    verdict = f"DIFFERS: {wrong}" if wrong else "same" if compared else ""
    return f"{result['seconds']:5.1f} s  {name:60} {loss!s:20} {digest}  {verdict}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
