"""Linear layers whose three GEMMs run in low precision, and the function that puts them into a model.

    plan = linear.convert(model, PrecisionConfig(kind="int8_rowcol"))
    print(plan.table())
    ... train as before; state dict and parameters are unchanged ...

`convert` works on any module tree. Parameters keep their names and remain ordinary tensors. Only the kind
`int8_weight_only` replaces weights, by Int8Weights.
"""

from lptune.linear import kinds
from lptune.linear.convert import convert, native_kinds, unconvert
from lptune.linear.dtensors import check_part, on_this_rank, placed_as
from lptune.linear.kind import KINDS, Kind, LinearSpec
from lptune.linear.low_precision import LowPrecision
from lptune.linear.module import (
    LowPrecisionLinear,
    QuantizedTokens,
    gather_in_8_bits,
    local_part,
    weights_changed,
)
from lptune.linear.plan import PLAN_COLUMNS, LayerPlan, Plan
from lptune.linear.steps.delayed import DelayedScaling
from lptune.linear.steps.precomputed import PrecomputedScales
from lptune.linear.steps.stochastic import StochasticRounding
from lptune.linear.verify import (
    FirstStep,
    PrecisionNotAppliedError,
    Verified,
    planned_gathers,
    verify_exchanges,
    verify_gathers,
    verify_reductions,
    verify_step,
    verify_token_gathers,
)
from lptune.linear.weights.compute_weights import ComputeWeights, use_compute_weights
from lptune.linear.weights.groups import FSDP_AXIS, fsdp_groups, note_group, padded_numel
from lptune.linear.weights.int8_weight import (
    INT8_SCALE,
    Int8Weight,
    dequantized,
    fill_stored,
    int8_rows,
    is_stored_in_place,
    row_scales,
    stored_beside,
)
from lptune.linear.weights.master_weight import GatheredWeight, MasterWeight, plain_rows
from lptune.linear.weights.reduce_scatter import num_narrow_reductions, reduce_narrowly
from lptune.linear.weights.row_tensor import RowTensor

__all__ = [
    "FSDP_AXIS",
    "INT8_SCALE",
    "PLAN_COLUMNS",
    "ComputeWeights",
    "DelayedScaling",
    "FirstStep",
    "GatheredWeight",
    "KINDS",
    "Int8Weight",
    "Kind",
    "LayerPlan",
    "LinearSpec",
    "LowPrecision",
    "LowPrecisionLinear",
    "MasterWeight",
    "Plan",
    "PrecisionNotAppliedError",
    "PrecomputedScales",
    "QuantizedTokens",
    "RowTensor",
    "StochasticRounding",
    "Verified",
    "check_part",
    "convert",
    "dequantized",
    "fill_stored",
    "fsdp_groups",
    "gather_in_8_bits",
    "int8_rows",
    "is_stored_in_place",
    "kinds",
    "local_part",
    "native_kinds",
    "note_group",
    "num_narrow_reductions",
    "on_this_rank",
    "padded_numel",
    "placed_as",
    "plain_rows",
    "planned_gathers",
    "reduce_narrowly",
    "row_scales",
    "stored_beside",
    "unconvert",
    "use_compute_weights",
    "verify_exchanges",
    "verify_gathers",
    "verify_reductions",
    "verify_step",
    "verify_token_gathers",
    "weights_changed",
]
