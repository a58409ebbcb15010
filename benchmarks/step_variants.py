"""The variants of benchmarks/step.py: who does a training step, each with the same weights and rows.

A variant is called for one step and returns its seconds, loss and gradient norm. `make` builds one by name;
a name that cannot run here raises `NotHere` with the reason.

    none, int8_rowcol, ...     lptune's verbs as in recipes/full_finetune.py, one rank, blocks compiled
    KIND-fsdp                  the same under FSDP2 on the one rank; runs if it is named
    torchao-KIND               the same loop with torchao's conversion in place of lptune's
    transformers[-compiled]    LlamaForCausalLM, float32 weights under torch.autocast, fused AdamW
    torchtune[-compiled]       step_torchtune.py in a venv of its own: weights and moments in bfloat16

Shapes: B rows, S tokens of a row.
"""

import json
import os
import random
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import device_type
from linear import convert_to_torchao, has_float8  # benchmarks/linear.py
from safetensors.torch import save_file
from torch import Tensor, nn

from lptune import checkpoint, distributed, linear, models, training
from lptune.config import OptimizerConfig, PrecisionConfig

LEARNING_RATE, MAX_GRAD_NORM = 1e-5, 1.0
TORCHTUNE, TORCHTUNE_TORCHAO = "0.6.1", "0.13.0"
"""The newest torchao with which torchtune 0.6.1 was tried; its torch is this process's."""
TORCHAO_KINDS = ("int8_rowcol", "float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp")
UPDATE = "step: update"
"""The profiler's name for clipping and update, in all variants of this process."""


class NotHere(Exception):  # noqa: N818  (it is an answer, not an error)
    """A variant does not run on this machine; the message says why."""


class Step(NamedTuple):
    """One training step."""

    seconds: float
    """Of forward, backward, clipping and update, until loss and norm are on the host."""
    loss: float
    """Mean over the targets, before the update."""
    grad_norm: float
    """Before clipping."""


class Packed(NamedTuple):
    """Packed rows: whole documents one after the other."""

    tokens_BS: Tensor
    """int64."""
    labels_BS: Tensor
    """int64, the next token of the same document; -100 at the end of a document."""
    bounds: models.DocumentBounds

    @classmethod
    def random(cls, batch: int, seq_len: int, vocab_size: int, seed: int) -> "Packed":
        """Random tokens, three to six documents a row with random lengths."""
        rng = random.Random(seed)
        positions, index, starts = list[Tensor](), list[Tensor](), list[int]()
        for row in range(batch):
            cuts = sorted(rng.sample(range(1, seq_len), rng.randint(3, 6) - 1))
            lengths = [end - begin for begin, end in zip([0, *cuts], [*cuts, seq_len], strict=True)]
            positions.append(torch.cat([torch.arange(length) for length in lengths]))
            index.append(torch.repeat_interleave(torch.tensor(lengths)))
            starts += [row * seq_len + start for start in [0, *cuts]]
        index_BS = torch.stack(index)
        generator = torch.Generator().manual_seed(seed)
        tokens_BS = torch.randint(0, vocab_size, (batch, seq_len), generator=generator)
        labels_BS = torch.full_like(tokens_BS, models.IGNORE_INDEX)
        same = index_BS[:, 1:] == index_BS[:, :-1]
        labels_BS[:, :-1] = torch.where(same, tokens_BS[:, 1:], models.IGNORE_INDEX)
        offsets = torch.tensor([*starts, batch * seq_len], dtype=torch.int32)
        return cls(tokens_BS, labels_BS, models.DocumentBounds(torch.stack(positions), index_BS, offsets))

    @property
    def num_targets(self) -> int:
        """Number of labels that are not -100."""
        return int((self.labels_BS != models.IGNORE_INDEX).sum())

    def to(self, device: torch.device) -> "Packed":
        """The same rows on `device`."""
        bounds = models.DocumentBounds(*(each.to(device) for each in self.bounds))
        return Packed(self.tokens_BS.to(device), self.labels_BS.to(device), bounds)


class Setting(NamedTuple):
    """What all variants share."""

    folder: Path
    """Has config.json and model.safetensors as transformers writes them, and rows.safetensors."""
    rows: Packed
    world: distributed.World
    execution: distributed.Execution
    venv: Path
    """Where torchtune is installed, or is to be."""


def write_inputs(folder: Path, config: dict[str, Any], rows: Packed, seed: int) -> None:
    """Writes a random checkpoint of `config` (keys of config.json) and the rows."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = models.build_on_meta(models.read_config(folder)).to_empty(device="cpu")
    model.init_weights(seed)
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / "model.safetensors")
    named = {"tokens": rows.tokens_BS, "labels": rows.labels_BS}
    named |= {"positions": rows.bounds.positions_BS, "documents": rows.bounds.index_BS}
    save_file(named, folder / "rows.safetensors")


def native_kinds() -> list[str]:
    """`none` and the kinds that this device runs without emulation."""
    return linear.native_kinds(torch.device(device_type()))


def all_names() -> list[str]:
    """The variants that a device could run, in the order of the table."""
    names = [*native_kinds(), *(f"torchao-{kind}" for kind in TORCHAO_KINDS)]
    return [*names, "transformers", "transformers-compiled", "torchtune", "torchtune-compiled"]


def fsdp_names() -> list[str]:
    """Further variants, which run if they are named."""
    return [f"{kind}-fsdp" for kind in native_kinds()]


def make(name: str, setting: Setting) -> Callable[[], Step]:
    """Builds the variant `name`. Raises NotHere if it cannot run on this machine."""
    whose, _, rest = name.partition("-")
    if rest == "fsdp":
        parallel = replace(setting.execution.parallel, reshard_after_forward=True)
        setting = setting._replace(execution=replace(setting.execution, parallel=parallel))
        name, rest = whose, ""
    if whose == "torchtune":
        if setting.execution.compute_dtype != "bfloat16":
            raise NotHere("its recipe is measured in bfloat16")
        return TorchtuneProcess(setting, rest or "eager")
    if whose == "transformers":
        return _timed(_transformers(setting, compiled=rest == "compiled"))
    return _timed(_lptune(setting, name if whose != "torchao" else "none", rest or None))


def _timed(once: Callable[[], tuple[float, float]]) -> Callable[[], Step]:
    def step() -> Step:
        started = time.perf_counter()
        loss, norm = once()  # as numbers, so the device has finished
        return Step(time.perf_counter() - started, loss, norm)

    return step


def _lptune(setting: Setting, kind: str, torchao_kind: str | None) -> Callable[[], tuple[float, float]]:
    """The step of recipes/full_finetune.py, with torchao's conversion if torchao_kind is not None."""
    world, execution, rows = setting.world, setting.execution, setting.rows.to(setting.world.device)
    base = checkpoint.read_base(str(setting.folder), world.print)
    model = base.build_on_meta()
    plan = linear.convert(model, PrecisionConfig(kind=kind), device=world.device)
    if torchao_kind is not None and convert_to_torchao(torchao_kind, model.get_submodule("model")) is None:
        needs_gpu = "float8" in torchao_kind and not has_float8()
        what = "torchao's float8 needs a GPU of compute capability 8.9" if needs_gpu else "no torchao here"
        raise NotHere(what)
    own_code(model.model.layers)
    if torchao_kind is not None:
        # torchao's layers break the graph of a block, which lptune's own compilation does not allow.
        distributed.compile_forward(model.model.layers, execution.compile, fullgraph=False)
        distributed.compile_forward([model.chunk_loss], execution.compile, fullgraph=True)
        execution = replace(execution, compile="none")
    distributed.parallelize(model, world, execution)
    distributed.materialize(model, world, execution)
    optimizer = training.build_optimizer(model, OptimizerConfig(lr=LEARNING_RATE))
    low = linear.LowPrecision(model, plan, optimizer, world=world)
    checkpoint.load_hf(model, base.index, world)
    update = training.Update(model, optimizer, world, MAX_GRAD_NORM, low)
    num_targets, number = rows.num_targets, 0

    def once() -> tuple[float, float]:
        nonlocal number
        with low.step(number, num_passes=1):
            loss_sum = torch.zeros((), device=world.device)
            for batch in distributed.accumulate(model, [rows], world, execution, low):
                loss = model(batch.tokens_BS, batch.bounds, batch.labels_BS)
                (loss * (world.data_size / num_targets)).backward()
                loss_sum += loss.detach()
        number += 1
        with torch.profiler.record_function(UPDATE):
            return tuple(update(loss_sum, num_targets))

    return once


def own_code(modules: Iterable[nn.Module]) -> None:
    """Gives the forward of `modules`, which are of one class, a code object of their own, in place.

    Dynamo keeps compiled graphs by code object. A graph that ends at a break in torchao's first layer guards
    nothing that comes after it, so the blocks of the other variants would match it too, and run the rest
    eagerly, in spite of fullgraph.
    """
    copies: dict[type[nn.Module], Any] = {}
    for module in modules:
        forward = type(module).forward
        if type(module) not in copies:
            code = forward.__code__.replace(co_name="forward")
            copies[type(module)] = types.FunctionType(
                code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
            )
        module.forward = types.MethodType(copies[type(module)], module)  # type: ignore[method-assign]


def _transformers(setting: Setting, compiled: bool) -> Callable[[], tuple[float, float]]:
    """What a plain loop with transformers does: float32 weights under autocast, a mask by document."""
    try:
        from transformers import LlamaForCausalLM
        from transformers.utils import logging
    except ImportError:
        raise NotHere("transformers is not installed") from None
    logging.disable_progress_bar()
    device = setting.world.device
    rows = setting.rows.to(device)
    model = LlamaForCausalLM.from_pretrained(
        setting.folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    ).to(device)
    model.train()
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    index_BS, num_targets = rows.bounds.index_BS, rows.num_targets
    seq_len = index_BS.shape[1]
    in_bfloat16 = setting.execution.compute_dtype == "bfloat16"

    def once() -> tuple[float, float]:
        causal_SS = torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).tril()
        mask_B1SS = ((index_BS[:, :, None] == index_BS[:, None, :]) & causal_SS)[:, None]
        with torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16):
            loss = run(
                input_ids=rows.tokens_BS,
                attention_mask=mask_B1SS,
                position_ids=rows.bounds.positions_BS,
                labels=rows.labels_BS,
                shift_labels=rows.labels_BS,  # shifted already
                num_items_in_batch=num_targets,
                use_cache=False,
            ).loss
        loss.backward()
        with torch.profiler.record_function(UPDATE):
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()

    return once


class TorchtuneProcess:
    """step_torchtune.py as a child that does one step for each line it gets."""

    def __init__(self, setting: Setting, mode: str) -> None:
        python = install_torchtune(setting.venv)
        self._log = setting.folder / f"torchtune-{mode}.txt"
        script = Path(__file__).with_name("step_torchtune.py")
        arguments = [setting.folder, mode, torch.get_num_threads(), setting.world.device.type]
        command = [python, script, *arguments, LEARNING_RATE, MAX_GRAD_NORM]
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with self._log.open("w") as log:
            self._child = subprocess.Popen(
                [str(each) for each in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=clean,
                text=True,
            )
        self._answer()

    def __call__(self) -> Step:
        """One step, timed by the child."""
        assert self._child.stdin is not None
        self._child.stdin.write("step\n")
        self._child.stdin.flush()
        return Step(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise NotHere(f"torchtune's process ended: {said[-1] if said else 'no message'}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends the child."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def install_torchtune(venv: Path) -> Path:
    """Makes `venv` with torchtune and this process's version of torch, once; returns its Python.

    Raises NotHere if pip fails.
    """
    python, done = venv / "bin" / "python", venv / ".installed"
    if done.exists():
        return python
    version = torch.__version__.partition("+")[0]  # the build, of a CPU or a CUDA, is what pip is set up for
    packages = [
        f"torchtune=={TORCHTUNE}",
        f"torchao=={TORCHTUNE_TORCHAO}",
        f"torch=={version}",
        "setuptools<80",
    ]
    for command in (
        [sys.executable, "-m", "venv", str(venv)],
        [str(python), "-m", "pip", "install", "--quiet", *packages],
    ):
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            lines = made.stderr.strip().splitlines() or ["no message"]
            raise NotHere(f"torchtune {TORCHTUNE} cannot be installed: {lines[-1]}")
    done.touch()
    return python
