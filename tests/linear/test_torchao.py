"""Against torchao 0.18: the same formulas give the same results, and each difference has a name and a bound.

A layer's result is made in two steps, and the two are compared apart:

    operands   what was quantized, and by which scale; ours and the peer's, recorded where a GEMM gets them
    GEMM       what is made of the same operands

Operands are equal to the last bit or differ by one of the formulas named below; that there is no other is
shown by replacing that one formula in the peer by ours, after which they are equal. The GEMMs differ by the
roundings of a float32 sum. The table of all differences stands in docs/numerics.md, "Against torchao".

Every peer also shows that it ran in 8 bits at all, by an error that is the format's: torchao's INT8 training
without `module_swap` runs none of its GEMMs and gives perfect results.
"""

import dataclasses
import math
from typing import NamedTuple

import pytest

# Not every machine with a GPU has it.
pytest.importorskip("torchao", reason="torchao is not installed (extra `test`)")

import torch
import torchao.float8.float8_utils as ao_utils
from torch import Tensor
from torch.utils._triton import has_triton
from torchao.float8 import Float8LinearConfig
from torchao.prototype.quantized_training.int8 import quantize_int8_rowwise

from lptune import numerics
from lptune.kernels import GEMMS, cpu_gemms, layer_handle, scaled_mm
from lptune.numerics import E4M3, E5M2, INT8, Format, scale_from_amax
from tests.helpers.torchao_peer import (
    DTYPES,
    UNIT,
    assert_really_low,
    assert_within,
    dequantized_blocks,
    exact_epilogue,
    make_inputs,
    noise_of,
    randn,
    run_blockwise_peer,
    run_float8_peer,
    run_int8_peer,
    run_ours,
    same_bits,
    sum_of_magnitudes,
)
from tests.proofs.noise import predicted_block_error, relative_error

EPS = 1e-12  # torchao's floor of a scale (INT8) or an amax (float8)
NO_LAYER = layer_handle(-1)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


# ---- float8: tensorwise, rowwise, rowwise_with_gw_hp

ROWWISE = Float8LinearConfig.from_recipe_name("rowwise")
GW_HP = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
# The peer's gw_hp takes one scale for the whole of W in grad_input; with one per column it is ours.
GW_HP_BY_COLUMN = dataclasses.replace(GW_HP, cast_config_weight_for_grad_input=GW_HP.cast_config_weight)
FLOAT8 = {
    "tensorwise": (Float8LinearConfig(), {"kind": "float8_tensorwise"}),
    "rowwise": (ROWWISE, {"kind": "float8_rowwise", "grad_input": "column"}),
    "gw_hp_by_column": (GW_HP_BY_COLUMN, {"kind": "float8_rowwise_with_gw_hp", "grad_input": "column"}),
}


@every_dtype
@pytest.mark.parametrize("name", FLOAT8)
def test_float8_equals_the_peer(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    (config, precision), inputs = FLOAT8[name], make_inputs(dtype)
    peer, ours = run_float8_peer(monkeypatch, inputs, config), run_ours(monkeypatch, inputs, **precision)
    assert set(peer.operands) == set(ours.operands) == set(GEMMS[: 2 if "gw_hp" in name else 3])
    for gemm, theirs in peer.operands.items():
        mine = ours.operands[gemm]
        assert same_bits(mine.a_MK, theirs.a_MK), gemm
        assert same_bits(mine.b_KN, theirs.b_KN), gemm
        for scale, peers in zip(mine[2:], theirs[2:], strict=True):
            # Powers of two have exact reciprocals. Else the peer dequantizes by fl(max / amax), ours by
            # fl(amax / max), each rounded once; `theirs` holds a reciprocal rounded once more.
            exact = name != "tensorwise"
            assert ((scale.double() / peers.double() - 1).abs() <= (0 if exact else 3.01 * 2.0**-24)).all()
        # A float32 sum of k products is within k roundings of the sum of their magnitudes, whatever its
        # order; the peer divides each operand by its scale first, we multiply the sum by both.
        k = theirs.a_MK.shape[1]
        difference = 2 * (k + 6) * 2.0**-24 * sum_of_magnitudes(theirs)
        assert_within(ours.results[gemm], peer.results[gemm], difference, dtype)
    if "gw_hp" in name:
        assert torch.equal(ours.results["grad_weight"], peer.results["grad_weight"])


@every_dtype
def test_the_float8_peers_ran_in_8_bits(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    x, w, g = inputs = make_inputs(dtype)
    all_of_it, rows, columns = (0, 1), 1, 0
    tensorwise_noise = {
        "output": noise_of((x, all_of_it, E4M3, False), (w, all_of_it, E4M3, False)),
        "grad_input": noise_of((g, all_of_it, E5M2, False), (w, all_of_it, E4M3, False)),
        "grad_weight": noise_of((g, all_of_it, E5M2, False), (x, all_of_it, E4M3, False)),
    }
    rowwise_noise = {
        "output": noise_of((x, rows, E4M3, True), (w, rows, E4M3, True)),
        "grad_input": noise_of((g, rows, E4M3, True), (w, columns, E4M3, True)),
        "grad_weight": noise_of((g, columns, E4M3, True), (x, columns, E4M3, True)),
    }
    gw_hp_noise = {
        "output": rowwise_noise["output"],
        "grad_input": noise_of((g, rows, E4M3, True), (w, all_of_it, E4M3, True)),
    }
    for config, noise in (
        (Float8LinearConfig(), tensorwise_noise),
        (ROWWISE, rowwise_noise),
        (GW_HP, gw_hp_noise),
    ):
        assert_really_low(run_float8_peer(monkeypatch, inputs, config), inputs, noise)


@every_dtype
def test_gw_hp_differs_by_the_tensorwise_weight_of_grad_input_alone(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    _, w, g = inputs = make_inputs(dtype)
    w[3] *= 2000  # an outlier row: by one scale for all of W, many of the others' are subnormals of e4m3
    peer, by_column = (run_float8_peer(monkeypatch, inputs, config) for config in (GW_HP, GW_HP_BY_COLUMN))
    for gemm in ("output", "grad_weight"):
        assert torch.equal(peer.results[gemm], by_column.results[gemm])
    assert same_bits(peer.operands["grad_input"].a_MK, by_column.operands["grad_input"].a_MK)
    whole = numerics.quantize_tensor(w, E4M3, power_of_two=True)
    assert same_bits(peer.operands["grad_input"].b_KN, whole.q_MK)
    assert torch.equal(peer.operands["grad_input"].scale_b, whole.scale_11)

    ours = run_ours(monkeypatch, inputs, kind="float8_rowwise_with_gw_hp", grad_input="column")
    # Both are within their own quantization noise of the truth; apart by both at most, as variances.
    by_tensor = noise_of((g, 1, E4M3, True), (w, (0, 1), E4M3, True))
    by_row = noise_of((g, 1, E4M3, True), (w, 0, E4M3, True))
    apart = relative_error(ours.results["grad_input"], peer.results["grad_input"])
    assert 0 < apart <= 1.05 * math.hypot(by_tensor, by_row) + 2 * UNIT[dtype]


# ---- float8: scales


def _peer_scale(amax: Tensor, fmt: Format, power_of_two: bool) -> Tensor:
    """The peer's scale for each amax: it quantizes, where ours dequantizes."""
    return ao_utils.amax_to_scale(amax, fmt.dtype, power_of_two)


def _every_bfloat16() -> Tensor:
    """All finite positive bfloat16 numbers, as amaxes in float32."""
    bits = torch.arange(1, 0x7F80, dtype=torch.int32) << 16
    return bits.view(torch.float32)


@pytest.mark.parametrize("power_of_two", [False, True], ids=["ratio", "power_of_two"])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_the_float8_scale_of_every_bfloat16_amax_is_the_peers_above_its_eps(
    monkeypatch: pytest.MonkeyPatch, fmt: Format, power_of_two: bool
) -> None:
    amax = _every_bfloat16()
    ours = scale_from_amax(amax, fmt, power_of_two)
    above = amax.double() >= EPS
    theirs = _peer_scale(amax, fmt, power_of_two)
    assert torch.equal(ours.inverse[above], theirs[above])
    # Below, the peer quantizes as if the amax were 1e-12.
    floor = _peer_scale(torch.tensor(EPS, dtype=torch.float64), fmt, power_of_two)
    assert (theirs[~above] == floor).all()
    # That one formula replaced: equal down to our smallest scale, 2**-126.
    monkeypatch.setattr(ao_utils, "EPS", 0.0)
    ours_ends = amax.double() > fmt.max * 2.0**-126
    assert torch.equal(ours.inverse[ours_ends], _peer_scale(amax, fmt, power_of_two)[ours_ends])


# ---- float8, blockwise


BLOCKWISE_INPUTS = {"t": 128, "k": 256, "n": 384}


@every_dtype
def test_blockwise_equals_the_peer(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    x, w, g = inputs = make_inputs(dtype, **BLOCKWISE_INPUTS)
    peer, ours = (
        run_blockwise_peer(monkeypatch, inputs),
        run_ours(monkeypatch, inputs, kind="float8_blockwise"),
    )
    assert set(ours.operands) == set(GEMMS)
    for gemm, theirs in peer.operands.items():
        mine = ours.operands[gemm]
        assert same_bits(mine.a_MK, theirs.a_MK), gemm
        assert same_bits(mine.b_KN, theirs.b_KN), gemm
        for scale, peers in zip(mine[2:], theirs[2:], strict=True):
            # The peer stores fl(1 / fl(max / amax)), ours is fl(amax / max): three roundings.
            assert ((scale.double() / peers.double() - 1).abs() <= 3.01 * 2.0**-24).all()
        a64, b64 = dequantized_blocks(theirs)
        # Ours: scales 3 roundings apart and one more when applied, for each operand, and a float32 sum.
        k = theirs.a_MK.shape[1]
        difference = (k + 8) * 2.0**-24 * (1 + 2.0**-10) * (a64.abs() @ b64.abs())
        assert_within(ours.results[gemm], peer.results[gemm], difference, dtype)

    def noise(a: Tensor, block_a: tuple[int, int], b: Tensor, block_b: tuple[int, int]) -> float:
        return math.hypot(predicted_block_error(a, block_a, E4M3), predicted_block_error(b, block_b, E4M3))

    assert_really_low(
        peer,
        inputs,
        {
            "output": noise(x, (1, 128), w, (128, 128)),
            "grad_input": noise(g, (1, 128), w, (128, 128)),
            "grad_weight": noise(g, (128, 1), x, (128, 1)),
        },
    )


# ---- INT8


class Int8Formula(NamedTuple):
    """How the peer quantizes a row, with each formula that differs replaceable by ours."""

    scale_in_input_dtype: bool = True
    inverse_of_the_scale: bool = True
    eps: float = EPS

    def __call__(self, x_MK: Tensor) -> tuple[Tensor, Tensor]:
        amax_M = x_MK.abs().amax(1)
        scale_M = amax_M / 127 if self.scale_in_input_dtype else (amax_M.double() / 127).float()
        if self.inverse_of_the_scale:
            inverse_M = 1 / scale_M.float().clip(self.eps)
        else:
            inverse_M = torch.where(amax_M == 0, 0.0, (127 / amax_M.double()).float())
        q_MK = (x_MK.float() * inverse_M[:, None]).round().clip(-128, 127).to(torch.int8)
        return q_MK, scale_M


PEERS = Int8Formula()
OURS = Int8Formula(scale_in_input_dtype=False, inverse_of_the_scale=False, eps=0.0)
ALL_DTYPES = (*DTYPES, torch.float16)


def _rows(dtype: torch.dtype) -> Tensor:
    """Rows of every magnitude that `dtype` holds well, an outlier in one of them, and a row of zeros."""
    low, high = (-14, 15) if dtype == torch.float16 else (-36, 60)
    powers = 2.0 ** torch.arange(low, high, dtype=torch.float32)
    x = randn(len(powers) + 2, 256, torch.float32, 0) / 8
    x[:-2] *= powers[:, None]
    x[-2, 7] = 1000
    x[-1] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_int8_rows_are_the_peers_but_for_the_formulas_named(dtype: torch.dtype) -> None:
    x = _rows(dtype)
    for tiny in (1.0, 2.0**-8):
        # The peer's quantizer as it is written down here is the peer's ...
        for a, b in zip(PEERS(x * tiny), quantize_int8_rowwise(x * tiny), strict=True):
            assert torch.equal(a, b)
    # ... and with these formulas replaced it is ours.
    ours = numerics.quantize_rows(x)
    q, scale = OURS(x)
    assert torch.equal(q, ours.q_MK)
    assert torch.equal(scale[:, None], ours.scale_M1)


NO_CPU_GEMM = pytest.mark.skipif(has_triton(), reason="beside a GPU torchao has an INT8 GEMM for CUDA only")


@NO_CPU_GEMM
@pytest.mark.skipif(not cpu_gemms.int_mm_is_exact(), reason="torch's INT8 GEMM saturates on this CPU")
@every_dtype
def test_the_int8_peer_ran_in_8_bits_and_its_gemm_is_ours(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    x, w, g = inputs = make_inputs(dtype)
    peer = run_int8_peer(monkeypatch, inputs)
    noise = {
        "output": noise_of((x, 1, INT8, False), (w, 1, INT8, False)),
        "grad_input": noise_of((g, 1, INT8, False), (w, 0, INT8, False)),
        "grad_weight": noise_of((g, 0, INT8, False), (x, 0, INT8, False)),
    }
    assert_really_low(peer, inputs, noise)
    for gemm, theirs in peer.operands.items():
        ours = scaled_mm(*theirs, torch.float32, NO_LAYER, 0, emulate=True).double()
        # The sum is exact in int32. The peer's CPU epilogue converts it to the scales' dtype and multiplies
        # by one scale and then the other, three roundings; ours multiplies in float32 and rounds at the end.
        bound = (3 * UNIT[dtype] + 3 * 2.0**-24) * (1 + UNIT[dtype]) ** 3 * ours.abs()
        assert ((peer.results[gemm].double() - ours).abs() <= bound).all(), gemm


@every_dtype
def test_int8_equals_ours_with_the_named_formulas_replaced(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    inputs = make_inputs(dtype)
    ours = run_ours(monkeypatch, inputs, kind="int8_rowcol", grad_input="column")
    peer = run_int8_peer(
        monkeypatch,
        inputs,
        quantize_int8_rowwise=OURS,
        scaled_int8_mm=lambda *operands: exact_epilogue(*operands).to(dtype),
    )
    for gemm, theirs in peer.operands.items():
        for a, b in zip(ours.operands[gemm], theirs, strict=True):
            assert torch.equal(a, b), gemm
        if gemm == "grad_weight":
            # (x.T @ g).T: the scale of x is applied first, ours applies g's. Two float32 roundings each.
            difference = 4.01 * 2.0**-24 * ours.results[gemm].double().abs()
            assert_within(ours.results[gemm], peer.results[gemm], difference, dtype)
        else:
            assert torch.equal(ours.results[gemm], peer.results[gemm]), gemm
