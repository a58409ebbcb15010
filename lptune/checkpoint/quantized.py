"""What an export in 8 bits stores (`export.quantized`): the weights that the run multiplied by, in layouts
that servers read.

    int8           compressed-tensors, int-quantized:    X.weight int8 (N, K),      X.weight_scale (N, 1)
    float8         compressed-tensors, float-quantized:  X.weight e4m3 (N, K),      X.weight_scale (N, 1)
    float8_block   DeepSeek's and Qwen's FP8:            X.weight e4m3 (N, K),
                                                         X.weight_scale_inv (ceil(N / 128), ceil(K / 128))

All scales are float32 and dequantize, W ≈ q * scale. A kind with one scale per tensor has a weight_scale of
(1,). Servers quantize tokens anew, each by its own amax.

A high-precision export that is quantized for a server is rounded a second time, with scales that training
never saw. Here the kind itself (`Kind.quantize_to_serve`) makes the values, from the float32 weights of the
checkpoint, as in the next forward pass. So they equal training's bit for bit where the kind has what the
format stores (`Kind.served_as`). Otherwise they are rounded as another kind would, and a note says so.

Only layers that ran in 8 bits are stored in them. All others stay high, and the config lists them.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lptune.base.errors import UserError
from lptune.base.text import names_of_group
from lptune.checkpoint.adapter import Source
from lptune.checkpoint.card import Part
from lptune.checkpoint.state import RunState
from lptune.config import PrecisionConfig
from lptune.linear import KINDS, Kind, LinearSpec

TO_HIGH = "set export.quantized=none (later: `lptune export RUN FOLDER --quantized none`)"
"""What a run's config does about a format that stores nothing; `lptune export` says its own option."""
_REQUANTIZE = f"{TO_HIGH}, and quantize that with the server's tool"
_OWNERS = re.compile(r"(model\.)?(language_model\.)?(model\.)?")


@dataclass(frozen=True)
class Quantizer:
    """Which weights of a checkpoint an export stores in 8 bits, and how."""

    format: str
    """`export.quantized`, not `none`."""
    kind: Kind
    """The kind that rounds them."""
    compute_dtype: torch.dtype
    """Of the run: weights are rounded to it first."""
    parameters: frozenset[str]
    """The weights of the layers that ran in 8 bits."""
    notes: tuple[str, ...]
    """Lines for the user: where the values are not those of training."""

    def scale_of(
        self, name: str, shape: tuple[int, ...], sources: Sequence[Source]
    ) -> tuple[str, tuple[int, ...]] | None:
        """Name and shape of the scale of the stored tensor `name`; None: the tensor stays high.

        Raises UserError if a layer ran in 8 bits whose tensor the format cannot store.
        """
        if not sources or any(source.parameter not in self.parameters for source in sources):
            return None
        block = self.kind.weight_block
        rows_only = not (block or self.kind.one_scale)
        for _, whole, part in sources:
            is_matrix = len(shape) == 2 and name.endswith(".weight") and part.dims in ((), (0, 1))
            # A row of the parameter is a row of the tensor; other scales belong to the whole of both.
            sizes = {each[1:] if rows_only else each for each in (part.sizes, shape, whole)}
            if not is_matrix or len(sizes) > 1:
                raise UserError(
                    f"export.quantized: {self.format} has no form for {name} {list(shape)}, whose layers ran "
                    f"in 8 bits; {_REQUANTIZE}"
                )
        if block:
            return f"{name}_scale_inv", tuple(math.ceil(size / block) for size in shape)
        return f"{name}_scale", (1,) if self.kind.one_scale else (shape[0], 1)

    def quantize(
        self, name: str, w_NK: Tensor, scale_shape: tuple[int, ...], beside: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(values, scale) of a weight in float32. name: of the tensor, for the error. beside: as in Kind.
        Raises UserError if a value is not finite.
        """
        spec = LinearSpec.from_config(PrecisionConfig(kind=self.kind.name))
        q_NK, scale = self.kind.quantize_to_serve(spec, w_NK, self.compute_dtype, beside)
        if not scale.isfinite().all():
            raise UserError(f"{name}: holds NaN or infinite values; export an earlier checkpoint")
        return q_NK.contiguous(), scale.reshape(scale_shape).contiguous()

    def config(self, high: Collection[str], *, is_part: bool) -> dict[str, Any]:
        """`quantization_config` of config.json. high: modules that stay high. is_part: the folder's model
        also sees, so the module of a reader is not named as its tensor: `model.vision_tower.…`.
        """
        if is_part:
            others = [_OWNERS.sub("", name, count=1) for name in high]
            if not self.kind.weight_block:  # where a name may be a pattern
                others = [rf"re:(.*\.)?{re.escape(name)}$" for name in others]
            high = list(dict.fromkeys([*high, *others]))
        if self.kind.weight_block:
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [self.kind.weight_block] * 2,
                "modules_to_not_convert": list(high),
            }
        numbers = {"num_bits": 8, "type": "int" if self.format == "int8" else "float", "symmetric": True}
        strategy = "tensor" if self.kind.one_scale else "channel"
        scheme = {
            "targets": ["Linear"],
            "weights": {**numbers, "strategy": strategy, "dynamic": False},
            "input_activations": {**numbers, "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if self.format == "int8" else "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme},
            "ignore": list(high),
            "kv_cache_scheme": None,
        }


def kind_for(format_: str, trained: Kind) -> Kind:
    """The kind that rounds for `format_`: `trained`, or of the others the most precise that the format has,
    with a scale per row or block.
    """
    usual = next(each for each in KINDS.values() if each.served_as == format_ and not each.one_scale)
    return trained if trained.served_as == format_ else usual


def how_to_quantize(format_: str, state: RunState, part: Part) -> Quantizer:
    """How to export a checkpoint as `export.quantized`, which is not `none`. part: the last steps before it.

    Raises UserError if no layer ran in 8 bits in these steps.
    """
    parameters = frozenset(
        f"{name}.weight"
        for group, _, *cells, note in part.layers  # PLAN_COLUMNS
        if not note and set(cells) - {"high", "frozen"}
        for name in names_of_group(group)
    )
    if not parameters:
        why = f"precision.kind={part.precision}" if part.layers else "an older version does not say which did"
        raise UserError(
            f"{state.folder}: no layer ran in 8 bits in its last steps ({why}), so there is none to "
            f"store in {format_}; {_REQUANTIZE}"
        )
    trained = KINDS[part.precision]
    kind = kind_for(format_, trained)
    notes = []
    if kind is not trained:
        notes.append(
            f"note: export.quantized={format_} has other values and scales than training with "
            f"{trained.name}: those of {kind.name}"
        )
    config = state.content.get("config", {})
    ranks = config.get("parallel.tensor", 1) if isinstance(config, dict) else 1
    if ranks != 1 and (kind.row_scales or kind.one_scale):
        notes.append(
            f"note: parallel.tensor={ranks} trained with scales of each rank's part of a weight; "
            f"export.quantized={format_} has those of whole rows and tensors"
        )
    return Quantizer(format_, kind, getattr(torch, part.compute_dtype), parameters, tuple(notes))


def modules_that_stay_high(
    stored: Mapping[str, tuple[int, ...]], quantized: Collection[str], word_names: tuple[str, str]
) -> list[str]:
    """The modules with matrices that an export does not quantize, in order; of experts, the module of all.

    stored: shape of each tensor of the export, by name. quantized: those in 8 bits. word_names: of the
    embedding, which is no linear layer, and of the head, which a tied model does not store.
    """
    embedding, head = word_names
    found: dict[str, None] = {}
    for name in [*stored, head]:
        if name in quantized or name == embedding or len(stored.get(name, (0, 0))) < 2:
            continue
        experts = f"{name.partition('.experts.')[0]}.experts"
        is_whole = name.startswith(f"{experts}.") and not any(q.startswith(f"{experts}.") for q in quantized)
        found[experts if is_whole else name.removesuffix(".weight")] = None
    return list(found)
