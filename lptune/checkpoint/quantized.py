"""What a quantized export stores (`export.quantized`): the weights that the run multiplied by, in layouts
that servers read.

    int8           compressed-tensors, int-quantized:    X.weight int8 (N, K),      X.weight_scale (N, 1)
    float8         compressed-tensors, float-quantized:  X.weight e4m3 (N, K),      X.weight_scale (N, 1)
    float8_block   DeepSeek's and Qwen's FP8:            X.weight e4m3 (N, K),
                                                         X.weight_scale_inv (ceil(N / 128), ceil(K / 128))
    int4           compressed-tensors, pack-quantized:   X.weight_packed int32 (N, ceil(K / 8)), codes + 8,
                                                         the first in the lowest bits,
                                                         X.weight_scale bfloat16 (N, K / 32), X.weight_shape
    bitnet         transformers' BitLinear:              X.weight uint8 (N / 4, K), codes + 1, the first in
                                                         the lowest bits, X.weight_scale bfloat16 (1,)

Scales dequantize, W ≈ q * scale, and are float32 but for int4 and bitnet, whose kinds make them in bfloat16;
bitnet stores 1 / scale, by which BitLinear divides. A kind with one scale per tensor has a weight_scale of
(1,). Servers of 8 bits, and BitLinear, quantize tokens anew, each by its own amax; those of int4 multiply in
16 bits.

A high-precision export that is quantized for a server is rounded a second time, with scales that training
never saw. Here the kind itself (`Kind.quantize_to_serve`) makes the values, from the float32 weights of the
checkpoint, as in the next forward pass. So they equal training's bit for bit where the kind has what the
format stores (`Kind.served_as`). Otherwise they are rounded as another kind would, and a note says so.

Only layers that ran so are stored so. All others stay high, and the config lists them.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lptune.base.errors import UserError
from lptune.base.text import names_of_group
from lptune.checkpoint.adapter import Source
from lptune.checkpoint.card import Part
from lptune.checkpoint.state import RunState
from lptune.config import PrecisionConfig
from lptune.linear import KINDS, Kind, LinearSpec
from lptune.models.quantized import PACKED
from lptune.numerics import FORMATS, pack_ternary, server_scale

_REQUANTIZE = (
    "export in high precision (`lptune export RUN FOLDER --quantized none`), and quantize that with the "
    "server's tool"
)
_COMPRESSED = {
    "int8": ("int-quantized", 8, "int"),
    "float8": ("float-quantized", 8, "float"),
    "int4": ("pack-quantized", 4, "int"),
}
"""`export.quantized` -> compressed-tensors' name of the format, bits, type."""
_OWNERS = re.compile(r"(model\.)?(language_model\.)?(model\.)?")


Form = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of the tensors that stand for a quantized one, by name."""


@dataclass(frozen=True)
class Quantizer:
    """Which weights of a checkpoint an export stores quantized, and how."""

    format: str
    """`export.quantized`, not `none`."""
    kind: Kind
    """The kind that rounds them."""
    compute_dtype: torch.dtype
    """Of the run: weights are rounded to it first."""
    parameters: frozenset[str]
    """The weights of the layers that ran in low precision."""
    notes: tuple[str, ...]
    """Lines for the user: where the values are not those of training."""

    def form_of(self, name: str, shape: tuple[int, ...], sources: Sequence[Source]) -> Form | None:
        """What stands for the tensor `name`; None: it stays high.

        Raises UserError if a layer ran in low precision whose tensor the format cannot store.
        """
        if not sources or any(source.parameter not in self.parameters for source in sources):
            return None
        block = self.kind.weight_block
        rows_only = not (block or self.kind.one_scale or self.kind.mean_scale)
        for _, whole, part in sources:
            is_matrix = len(shape) == 2 and name.endswith(".weight") and part.dims in ((), (0, 1))
            is_matrix = is_matrix and not shape[1] % self.kind.weight_group
            # A row of the parameter is a row of the tensor; other scales belong to the whole of both.
            sizes = {each[1:] if rows_only else each for each in (part.sizes, shape, whole)}
            if not is_matrix or len(sizes) > 1:
                raise UserError(
                    f"export.quantized: {self.format} has no form for {name} {list(shape)}, whose layers ran "
                    f"in low precision; {_REQUANTIZE}"
                )
        if self.packs:
            (n, k), group = shape, self.kind.weight_group
            return {
                f"{name}_packed": ((n, math.ceil(k / PACKED)), torch.int32),
                f"{name}_scale": ((n, math.ceil(k / group)), torch.bfloat16),
                f"{name}_shape": ((2,), torch.int64),
            }
        if self.kind.mean_scale:
            packed = (shape[0] // self.kind.weights_in_byte, shape[1])
            return {name: (packed, torch.uint8), f"{name}_scale": ((1,), torch.bfloat16)}
        codes = {name: (shape, FORMATS[self.kind.fmt].dtype)}
        if block:
            grid = tuple(math.ceil(size / block) for size in shape)
            return codes | {f"{name}_scale_inv": (grid, torch.float32)}
        scales = (1,) if self.kind.one_scale else (shape[0], 1)
        return codes | {f"{name}_scale": (scales, torch.float32)}

    @property
    def packs(self) -> bool:
        """Whether several codes are stored in one number."""
        return self.format == "int4"

    def quantize(
        self, name: str, w_NK: Tensor, form: Form, beside: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The tensors of `form` for a weight in float32. name: of the tensor. beside: as in Kind. Raises
        UserError if a value is not finite.
        """
        spec = LinearSpec.from_config(PrecisionConfig(kind=self.kind.name))
        q_NK, scale = self.kind.quantize_to_serve(spec, w_NK, self.compute_dtype, beside)
        if not scale.isfinite().all():
            raise UserError(f"{name}: holds NaN or infinite values; export an earlier checkpoint")
        made = [q_NK, scale]
        if self.packs:
            made = [_packed(q_NK), scale, torch.tensor(w_NK.shape)]
        elif self.kind.mean_scale:
            made = [pack_ternary(q_NK, 0), server_scale(scale)]
        return {
            each: tensor.to(dtype).reshape(shape).contiguous()
            for tensor, (each, (shape, dtype)) in zip(made, form.items(), strict=True)
        }

    def config(self, high: Collection[str], *, is_part: bool) -> dict[str, Any]:
        """`quantization_config` of config.json. high: modules that stay high. is_part: the folder's model
        also sees, so the module of a reader is not named as its tensor: `model.vision_tower.…`.
        """
        if is_part:
            others = [_OWNERS.sub("", name, count=1) for name in high]
            if self.format in _COMPRESSED:  # where a name may be a pattern
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
        if self.kind.mean_scale:
            # Its other class, AutoBitLinear, would multiply biases by the scale.
            offline = {"linear_class": "bitlinear", "quantization_mode": "offline"}
            return {"quant_method": self.format, **offline, "modules_to_not_convert": list(high)}
        format_, bits, type_ = _COMPRESSED[self.format]
        numbers = {"num_bits": bits, "type": type_, "symmetric": True}
        strategy = "group" if self.packs else "tensor" if self.kind.one_scale else "channel"
        groups = {"group_size": self.kind.weight_group} if self.packs else {}
        tokens = None if self.packs else {**numbers, "strategy": "token", "dynamic": True}
        scheme = {
            "targets": ["Linear"],
            "weights": {**numbers, "strategy": strategy, **groups, "dynamic": False},
            "input_activations": tokens,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": format_,
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme},
            "ignore": list(high),
            "kv_cache_scheme": None,
        }


def kind_for(format_: str, trained: Kind) -> Kind:
    """The kind that rounds for `format_`: `trained`, or of the others the most precise that the format has,
    with a scale per row or block. Raises UserError if the format is for one kind alone.
    """
    usual = next(each for each in KINDS.values() if each.served_as == format_ and not each.one_scale)
    if usual.mean_scale and trained is not usual:
        raise UserError(
            f"export.quantized: {format_} keeps three values of each weight, which only a model that was "
            f"trained with precision.kind={usual.name} survives, and this is {trained.name}; choose int8 or "
            "float8"
        )
    return trained if trained.served_as == format_ else usual


def how_to_quantize(format_: str, state: RunState, part: Part) -> Quantizer:
    """How to export a checkpoint as `export.quantized`, which is not `none`. part: the last steps before it.

    Raises UserError if no layer ran in low precision in these steps.
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
            f"{state.folder}: no layer ran in low precision in its last steps ({why}), so there is none to "
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
    if ranks != 1 and (kind.row_scales or kind.one_scale or kind.mean_scale):
        notes.append(
            f"note: parallel.tensor={ranks} trained with scales of each rank's part of a weight; "
            f"export.quantized={format_} has those of whole rows and tensors"
        )
    return Quantizer(format_, kind, getattr(torch, part.compute_dtype), parameters, tuple(notes))


def _packed(q_NK: Tensor) -> Tensor:
    """Codes of -8 to 7 as compressed-tensors packs them: 8 in an int32, plus 8, the first lowest."""
    q_NK = F.pad(q_NK.to(torch.int64) + 8, (0, -q_NK.shape[1] % PACKED))
    shifts = 4 * torch.arange(PACKED)
    packed: Tensor = (q_NK.unflatten(1, (-1, PACKED)) << shifts).sum(2)
    return packed.to(torch.int32)


def modules_that_stay_high(
    stored: Mapping[str, tuple[int, ...]], quantized: Collection[str], word_names: tuple[str, str]
) -> list[str]:
    """The modules with matrices that an export does not quantize, in order; of experts, the module of all.

    stored: shape of each tensor of the export, by name. quantized: those that are. word_names: of the
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
