"""Loads a model to use it: from a folder or a checkpoint, in any precision, whole on one device.

Weights are stored in the compute dtype (`int8_weight_only`: in INT8), because nothing updates them. Training
keeps float32 master weights and rounds them to the compute dtype in each forward, so a forward here gives the
bits of an evaluation of the run.

Kinds that quantize x and W do so in every forward. Their results are those of training in this precision;
they save no memory here, and save time only where a forward has many tokens. `int8_weight_only` is the kind
for small batches: each new token reads all weights, and INT8 halves the bytes of bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lptune import linear
from lptune.base.errors import UserError
from lptune.checkpoint import Trained, read_trained
from lptune.config import PrecisionConfig
from lptune.data import Tokenizer, load_tokenizer
from lptune.distributed import World
from lptune.kernels import emulated_bfloat16
from lptune.models import Backbone, Facts


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, and what belongs to it."""

    model: Backbone
    """On the device, without gradients."""
    tokenizer: Tokenizer
    trained: Trained
    """Where the weights and the tokenizer come from."""
    plan: linear.Plan
    """What each linear layer computes in 8 bits."""
    low: linear.LowPrecision
    """The state of kinds with a history (`float8_delayed`), which lives as long as this object."""


@dataclass(frozen=True)
class OpenedModel:
    """A model that was found, with its tokenizer. No weight was read: check all other input first."""

    trained: Trained
    tokenizer: Tokenizer

    @property
    def config(self) -> Facts:
        """The sizes of the model."""
        return self.trained.base.config

    def load(
        self,
        precision: PrecisionConfig,
        compute_dtype: str,
        world: World,
        *,
        num_tokens: int,
        notes: bool = True,
    ) -> LoadedModel:
        """Reads the weights. The arguments are those of `load_model`. notes: print those on the dtype."""
        self.trained.check_same(world)
        dtype: torch.dtype = getattr(torch, compute_dtype)
        for note in emulated_bfloat16(compute_dtype, world.device) if notes else ():
            world.print(f"note: {note}")
        model = self.trained.base.build_on_meta()
        in_float32 = frozenset[str]() if dtype == torch.float32 else model.float32_names
        for name, parameter in model.named_parameters():
            if name not in in_float32:
                parameter.data = parameter.data.to(dtype)
        plan = linear.convert(model, precision, device=world.device, num_tokens=num_tokens)
        model.to_empty(device=world.device)
        model.reset_buffers(world.device)
        low = linear.LowPrecision(model, plan, world=world, verify=False)
        self.trained.load(model, low.state())
        low.loaded()
        model.requires_grad_(False).train(False)
        return LoadedModel(model, self.tokenizer, self.trained, plan, low)


def open_model(
    path: str, say: Callable[[str], None], chat_template: str | None = None, key: str = "data.chat_template"
) -> OpenedModel:
    """Finds the model of `path`: a Hugging Face folder, an export, a checkpoint or the folder of a run.

    say: gets notes on the input. chat_template: as in `data.load_tokenizer`; None: the template that the
    model was trained with. key: the config's key of `chat_template`, for messages. Raises UserError as
    `checkpoint.read_trained` and `data.load_tokenizer` do.
    """
    trained = read_trained(path, say)
    template = chat_template if chat_template is not None else trained.chat_template
    try:
        tokenizer = load_tokenizer(trained.base.folder, template, date=trained.started_on)
    except UserError as error:
        raise UserError(str(error).replace("data.chat_template", key)) from None
    if (note := tokenizer.template_note) and tokenizer.chat_template != trained.chat_template:
        say(f"note: {note.replace('data.chat_template', key)}")
    return OpenedModel(trained, replace(tokenizer, learned_stops=trained.learned_stops))


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
    """`open_model` and `OpenedModel.load`: the model of `path` with its weights.

    compute_dtype: bfloat16 | float32. num_tokens: tokens of a forward, for `precision.skip_small`. say: None:
    `world.print`. Each rank of `world` has the whole model. Raises UserError as `open_model` and
    `linear.convert` do.
    """
    opened = open_model(path, say or world.print, chat_template)
    return opened.load(precision, compute_dtype, world, num_tokens=num_tokens)
