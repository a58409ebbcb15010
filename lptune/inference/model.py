"""Loads a model to use it: from a folder or a checkpoint, in any precision, whole on one device.

Weights are stored in the compute dtype (`int8_weight_only`: in INT8), because nothing updates them. Training
keeps float32 master weights and rounds them to the compute dtype in each forward, so a forward here gives the
bits of an evaluation of the run.

Kinds that quantize x and W do so in every forward. Their results are those of training in this precision;
they save no memory here, and save time only where a forward has many tokens. `int8_weight_only` is the kind
for small batches: each new token reads all weights, and INT8 halves the bytes of bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lptune import linear
from lptune.checkpoint import Trained, read_trained
from lptune.config import PrecisionConfig
from lptune.data import Tokenizer, load_tokenizer
from lptune.distributed import World
from lptune.models import Decoder, activate_attention


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, and what belongs to it."""

    model: Decoder
    """On the device, without gradients."""
    tokenizer: Tokenizer
    trained: Trained
    """Where the weights and the tokenizer come from."""
    plan: linear.Plan
    """What each linear layer computes in 8 bits."""
    low: linear.LowPrecision
    """The state of kinds with a history (`float8_delayed`), which lives as long as this object."""


def load_model(
    path: str,
    precision: PrecisionConfig,
    compute_dtype: str,
    world: World,
    *,
    num_tokens: int,
    chat_template: str | None = None,
    say: Callable[[str], None] | None = None,
) -> LoadedModel:
    """The model of `path`: a Hugging Face folder, an export, a checkpoint or the folder of a run.

    compute_dtype: bfloat16 | float32. num_tokens: tokens of a forward, for `precision.skip_small`.
    chat_template: as in `data.load_tokenizer`; None: the template that the model was trained with. say: gets
    notes on the input; None: `world.print`. Each rank of `world` has the whole model. Raises UserError as
    `checkpoint.read_trained`, `linear.convert` and `data.load_tokenizer` do.
    """
    trained = read_trained(path, say or world.print)
    dtype: torch.dtype = getattr(torch, compute_dtype)
    model = trained.base.build_on_meta().to(dtype)
    plan = linear.convert(model, precision, device=world.device, num_tokens=num_tokens)
    template = chat_template if chat_template is not None else trained.chat_template
    tokenizer = load_tokenizer(trained.base.folder, template, date=trained.started_on)
    activate_attention(world.device)
    model.to_empty(device=world.device)
    model.reset_buffers(world.device)
    low = linear.LowPrecision(model, plan, world=world, verify=False)
    trained.load(model, low.state())
    low.loaded()
    model.requires_grad_(False)
    return LoadedModel(model, tokenizer, trained, plan, low)
