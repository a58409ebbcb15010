"""Checks of settings that need no data, and the lines that tell which steps and kernels will run."""

import os
import shlex
from pathlib import Path
from typing import Any

import torch

from lptune.base import progress
from lptune.base.errors import UserError
from lptune.base.files import read_object
from lptune.config import RunConfig
from lptune.distributed import World, check_compiler, check_products, describe_mesh
from lptune.hardware.host_memory import available_bytes
from lptune.kernels import emulated_bfloat16
from lptune.linear import Plan
from lptune.models import Backbone
from lptune.training.lasting import lasting
from lptune.training.trackers import check_logging

_FEW_STEPS = 5


def check_settings(cfg: RunConfig, world: World) -> None:
    """Raises UserError for errors that can be found without a file: an extra or a compiler that is not
    installed, batches that cannot be divided among the ranks, a rank whose device multiplies otherwise than
    those of the others. A collective.
    """
    check_logging(cfg.logging)
    check_compiler(cfg.compile)
    cfg.check_ranks(world.size)
    check_products(world)


def describe_run(
    model: Backbone,
    plan: Plan,
    cfg: RunConfig,
    world: World,
    step: int,
    num_steps: int,
    one_document_per_row: bool,
) -> list[str]:
    """Lines to print before training: the steps, their tokens, the mesh and the kernels; and notes on
    settings that are rarely meant.

    model: parallelized. step: the next one, counted from 0. one_document_per_row: whether each row holds one
    document, which decides the kernel of attention. Raises UserError if the schedule does not fit the steps.
    """
    cfg.schedule.check_fits(num_steps)
    compute_dtype = getattr(torch, cfg.compute_dtype)
    attention = model.attention_backend(
        world.device, compute_dtype, one_document_per_row=one_document_per_row, seq_len=cfg.data.seq_len
    )
    backend = plan.backend(world.device.type)
    emulated = emulated_bfloat16(cfg.compute_dtype, world.device)
    return [
        f"steps {step} to {num_steps} of {cfg.global_batch_size} rows x {cfg.data.seq_len} tokens on "
        f"{describe_mesh(model, world)}",
        f"attention by {attention}" + (f", {plan.gemm_name} by {backend}" if backend else ""),
        *(f"note: {note}" for note in [*emulated, *_notes(model, cfg, num_steps)]),
    ]


def check_memory(model: Backbone, cfg: RunConfig, world: World, frozen: Backbone | None = None) -> None:
    """Prints the bytes that last on each rank beside those of its device, before data are read or weights
    loaded. `lptune plan` adds what a step takes for a while.

    model, frozen: as of `lasting`; frozen is a second model, which is not trained. Raises UserError, with a
    command that finds what fits, where the device or (cpu_offload, CPU) the host has not so many.
    """
    parts = [lasting(each, cfg, world.size) for each in (model, frozen) if each is not None]
    moments = sum(part.optimizer for part in parts)
    others = sum(part.weights + part.gradients for part in parts)
    what, more = "weights, gradients", "; activations on top"
    if cfg.optimizer.in_backward:
        what, more = "weights", "; activations and the gradients of a block on top"
    gpu = torch.cuda.get_device_properties(world.device) if world.device.type == "cuda" else None
    if gpu is not None and cfg.optimizer.cpu_offload and not cfg.parallel.cpu_offload:
        _check_held(others, what.replace(", ", " and "), more, world, gpu, on_host=False)
        _check_held(moments, "the optimizer", "", world, gpu, on_host=True)
        return
    on_host = gpu is None or cfg.parallel.cpu_offload
    _check_held(moments + others, f"{what} and the optimizer", more, world, gpu, on_host=on_host)


def _check_held(needed: int, what: str, more: str, world: World, gpu: Any, *, on_host: bool) -> None:
    """Prints that each rank holds `needed` bytes of `what`. Raises UserError as `check_memory`. gpu: of this
    rank, whether they are there or, on_host, in host memory; None: it has none.
    """
    name, has, held = "the host", available_bytes(), needed
    if on_host:
        held *= int(os.environ.get("LOCAL_WORLD_SIZE", world.size))  # the ranks of a machine share it
    else:
        name, has = gpu.name, gpu.total_memory
    of = "" if gpu is None or has is None else f" of {_size(has)}{' of the host' * on_host}"
    each = " a rank" if world.size > 1 else ""
    world.print(f"memory: {_size(needed)}{of}{each} for {what}{more}")
    if has is None or held <= has:
        return
    remedy = "lower it by optimizer.kind=adamw_8bit, optimizer.master=none or optimizer.in_backward=true"
    if gpu is not None:
        run = os.environ.get(progress.COMMAND, "RECIPE --config CONFIG")
        device = shlex.quote(gpu.name.removeprefix("NVIDIA "))
        remedy = (
            f"to find what fits: lptune plan {run} --world-size {world.size} --device {device} --write FILE"
        )
    alone = each if held == needed else ""
    raise UserError(f"memory: {what} take {_size(held)}{alone}, and {name} has {_size(has)}; {remedy}")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.1f} MiB"


def _notes(model: Backbone, cfg: RunConfig, num_steps: int) -> list[str]:
    """Notes on what is legal and rarely meant. A day of training may depend on each."""
    notes, most = [], model.facts.max_position_embeddings
    if cfg.data.seq_len > most:
        notes.append(
            f"data.seq_len={cfg.data.seq_len} is longer than what the model was made for "
            f"(max_position_embeddings {most})"
        )
    if cfg.data.chat_template == "none" and _has_template(Path(cfg.model.path).expanduser()):
        notes.append(
            "data.chat_template=none, and the export keeps the checkpoint's template, in which the model was "
            "not trained: generate from it with prompts.chat_template=none"
        )
    if cfg.optimizer.in_backward and cfg.max_grad_norm:
        notes.append(
            f"max_grad_norm={cfg.max_grad_norm:g} clips by the gradient norm of the step before, as "
            "optimizer.in_backward updates before the norm is known; max_grad_norm=0 switches it off"
        )
    if cfg.schedule.decay_steps == 1:
        notes.append(
            "schedule.decay_steps=1 never lowers the rate: the first step of a decay is at the peak; set at "
            "least 2"
        )
    if cfg.given_num_steps is None and num_steps <= _FEW_STEPS:
        steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
        notes.append(
            f"this run has {steps} in all: num_epochs={cfg.num_epochs} in batches of {cfg.global_batch_size} "
            "rows; lower global_batch_size or raise num_epochs for more"
        )
    if cfg.precision.is_none:
        notes.append(
            f"precision.kind=none trains in {cfg.compute_dtype}; `lptune advise` tells what 8 bits would gain"
        )
    if not cfg.data.eval_fraction and cfg.data.eval_source is None:
        notes.append("no held-out data will show overfitting; data.eval_fraction=0.02 holds out 2%")
    return notes


def _has_template(folder: Path) -> bool:
    in_tokenizer = read_object(folder / "tokenizer_config.json", missing={}).get("chat_template")
    return bool(in_tokenizer) or (folder / "chat_template.jinja").is_file()
