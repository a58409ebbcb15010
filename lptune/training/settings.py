"""Checks of settings that need no file, and the lines that tell which steps and kernels will run."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lptune.config import RunConfig, check_batches
from lptune.data import Loader
from lptune.distributed import World, check_compiler, describe_mesh
from lptune.linear import LowPrecision, Plan
from lptune.models import Decoder
from lptune.training.metrics import check_logging

if TYPE_CHECKING:
    from lptune.training.shadow import LossOf, RunFiles


def check_settings(cfg: RunConfig, world: World) -> None:
    """Raises UserError for errors that can be found without a file: an extra or a compiler that is not
    installed, batches that cannot be divided among the ranks.
    """
    check_logging(cfg.logging)
    check_compiler(cfg.compile)
    check_batches(cfg.global_batch_size, cfg.micro_batch_size, world.data_size)


def shadow_check(
    model: Decoder,
    low: LowPrecision,
    loader: Loader,
    cfg: RunConfig,
    world: World,
    run: "RunFiles",
) -> "Callable[[int, LossOf], dict[str, Any]]":
    """The shadow check of a run (shadow.py), to be called before each step with the number of steps done and
    the loss of a micro-batch. Without `precision.shadow_every` it does nothing. run: its folder exists.
    """
    if not cfg.precision.checks_shadow:
        return lambda step, loss_of: {}
    from lptune.training.shadow import ShadowCheck  # no other run needs it

    return ShadowCheck(model, low, loader, cfg, world, run)


def describe_run(
    model: Decoder,
    plan: Plan,
    cfg: RunConfig,
    world: World,
    step: int,
    num_steps: int,
    one_document_per_row: bool,
) -> list[str]:
    """Lines to print before training: the steps, their tokens, the mesh and the kernels.

    model: parallelized. step: the next one, counted from 0. one_document_per_row: whether each row holds one
    document, which decides the kernel of attention. Raises UserError if the schedule does not fit the steps.
    """
    cfg.schedule.check_fits(num_steps)
    lines, most = [], model.config.max_position_embeddings
    if cfg.data.seq_len > most:
        lines.append(
            f"note: data.seq_len={cfg.data.seq_len} is longer than what the model was made for "
            f"(max_position_embeddings {most})"
        )
    compute_dtype = getattr(torch, cfg.compute_dtype)
    attention = model.attention_backend(
        world.device, compute_dtype, one_document_per_row=one_document_per_row, seq_len=cfg.data.seq_len
    )
    backend = plan.backend(world.device.type)
    lines.append(
        f"steps {step} to {num_steps} of {cfg.global_batch_size} rows x {cfg.data.seq_len} tokens on "
        f"{describe_mesh(model, world)}, attention by {attention}"
        + (f", 8-bit GEMMs by {backend}" if backend else "")
    )
    return lines
