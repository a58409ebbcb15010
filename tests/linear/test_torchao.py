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
import torchao.prototype.quantized_training.int8_mixed_precision as ao_int8
from torch import Tensor
from torch.utils._triton import has_triton
from torchao.float8 import Float8LinearConfig
from torchao.prototype.quantized_training.int8 import quantize_int8_rowwise
from torchao.quantization import quantize_

from lptune import numerics
from lptune.kernels import GEMMS, cpu_gemms, layer_handle, scaled_mm
from lptune.numerics import E4M3, E5M2, INT8, Format, scale_from_amax
from tests.helpers.torchao_peer import (
    DTYPES,
    UNIT,
    Operands,
    assert_really_low,
    assert_within,
    dequantized_blocks,
    exact_epilogue,
    forward_backward,
    layer,
    make_inputs,
    noise_of,
    randn,
    run_blockwise_peer,
    run_float8_peer,
    run_int8_peer,
    run_ours,
    same_bits,
    sum_of_magnitudes,
    truth_of,
)
from tests.proofs.noise import predicted_block_error, relative_error, sqnr_db

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


def test_the_peer_quantizes_a_float32_weight_as_it_is_and_ours_in_compute_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # x and g in bfloat16, the master weight in float32: what is gathered in compute dtype and what was
    # quantized before the gather must give the same bits, so ours rounds the weight to bfloat16 first.
    x, w, g = make_inputs(torch.bfloat16)
    w32 = w.float() * 1.001  # no longer bfloat16 numbers
    mixed, rounded = (x, w32, g), (x, w32.bfloat16(), g)
    ours = run_ours(monkeypatch, mixed, kind="float8_tensorwise")
    peer_mixed, peer_rounded = (
        run_float8_peer(monkeypatch, each, Float8LinearConfig()) for each in (mixed, rounded)
    )
    assert not same_bits(peer_mixed.operands["output"].b_KN, ours.operands["output"].b_KN)
    for gemm in ("output", "grad_input"):
        assert same_bits(peer_rounded.operands[gemm].b_KN, ours.operands[gemm].b_KN)
    # The cast rounds each weight by 2**-8 of it at most, and so the scale; a number moves by a cell at most.
    scales = (peer_mixed.operands["output"].scale_b, ours.operands["output"].scale_b)
    assert abs(float(scales[0] / scales[1]) - 1) <= UNIT[torch.bfloat16] * 1.01
    a, b = (
        o.b_KN.double() * s.double()
        for o, s in zip((peer_mixed.operands["output"], ours.operands["output"]), scales, strict=True)
    )
    cell = E4M3.spacing((a / scales[0].double()).abs()) * scales[0].double()
    assert ((a - b).abs() <= cell + 3 * UNIT[torch.bfloat16] * a.abs()).all()


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


# What a magnitude of g does to the peer, whose scale stops at an amax of 1e-12: nothing; another scale with
# the same noise, as long as the numbers stay normal ones; subnormals; nothing left of it.
@pytest.mark.parametrize(
    ("name", "fmt", "magnitude", "effect"),
    [
        ("tensorwise", E5M2, 1e-11, "equal"),
        ("tensorwise", E5M2, 1e-16, "rescaled"),
        ("tensorwise", E5M2, 2e-21, "subnormal"),
        ("tensorwise", E5M2, 1e-22, "zero"),
        ("rowwise", E4M3, 1e-11, "equal"),
        ("rowwise", E4M3, 1e-16, "subnormal"),
        ("rowwise", E4M3, 1e-18, "zero"),
    ],
)
def test_the_float8_peers_eps_costs_it_small_gradients(
    monkeypatch: pytest.MonkeyPatch, name: str, fmt: Format, magnitude: float, effect: str
) -> None:
    (config, precision), (x, w, g) = FLOAT8[name], make_inputs(torch.float32)
    g = g / g.abs().max() * magnitude
    ours = run_ours(monkeypatch, (x, w, g), **precision).operands["grad_input"]
    peer = run_float8_peer(monkeypatch, (x, w, g), config).operands["grad_input"]
    assert same_bits(peer.a_MK, ours.a_MK) == (effect == "equal")
    assert same_bits(peer.b_KN, ours.b_KN)
    # That one formula replaced, and nothing else differs.
    monkeypatch.setattr(ao_utils, "EPS", 0.0)
    without = run_float8_peer(monkeypatch, (x, w, g), config).operands["grad_input"]
    assert same_bits(without.a_MK, ours.a_MK)

    def error(operands: Operands) -> float:
        return relative_error(operands.a_MK.double() * operands.scale_a.double(), g)

    def noise(scale: Tensor | float) -> float:
        """Of g quantized by `scale`, relative."""
        step = fmt.spacing(g.double() / scale) * scale
        return float(step.norm() / math.sqrt(12) / g.double().norm())

    assert error(ours) == pytest.approx(noise(ours.scale_a.double()), rel=0.05)  # 7,680 roundings
    if effect == "zero":  # below half of the smallest subnormal
        assert error(peer) == 1
    else:
        assert error(peer) == pytest.approx(noise(peer.scale_a.double()), rel=0.05)
        assert (error(peer) > 1.5 * error(ours)) == (effect == "subnormal")


def test_just_above_a_power_of_two_the_peers_logarithm_saturates(monkeypatch: pytest.MonkeyPatch) -> None:
    # The largest power of two not above s is found by floor(log2(s)) in float32. For s a hair below 2**-k
    # the logarithm rounds to -k, and the scale is twice ours: amax saturates, by that hair.
    exponents = torch.arange(-38, 60)
    exact = torch.ldexp(torch.full(exponents.shape, E4M3.max, dtype=torch.float64), exponents).float()
    above, differs = exact, []
    for _ in range(64):
        ours, theirs = scale_from_amax(above, E4M3, True).inverse, _peer_scale(above, E4M3, True)
        other = ours != theirs
        assert torch.equal(theirs[other], 2 * ours[other])
        # log2 is within one float32 step of |log2(s)|: half of it by rounding, half by its own error.
        hair = above.double() * theirs.double() / E4M3.max - 1
        step = 2.0 ** (torch.log2(exponents.abs().clamp(min=1).double()).floor() - 23)
        assert (hair[other] <= math.log(2) * step[other] + 2.0**-24).all()
        differs.append(int(other.sum()))
        above = above.nextafter(torch.full_like(above, math.inf))
    assert differs[0] == 0  # a power of two itself
    assert differs[1] > 0
    assert differs[-1] == 0
    # bfloat16's and float16's neighbours of 448 * 2**k are 2**-8 and 2**-11 away: those never differ.

    def exactly_down(scale: Tensor) -> Tensor:
        mantissa_and_exponent = torch.frexp(scale)
        return torch.ldexp(torch.ones_like(scale), mantissa_and_exponent.exponent - 1)

    monkeypatch.setattr(ao_utils, "_round_scale_down_to_power_of_2", exactly_down)
    above = exact
    for _ in range(64):
        # Left is the rounding of max / amax to 2**-k before any logarithm, which happens to no float32.
        assert torch.equal(scale_from_amax(above, E4M3, True).inverse, _peer_scale(above, E4M3, True))
        above = above.nextafter(torch.full_like(above, math.inf))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_what_is_not_finite_comes_out_as_nan_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, name: str, bad: float
) -> None:
    (config, precision), inputs = FLOAT8[name], make_inputs(torch.float32)
    inputs[0][5, 7] = bad
    for run in (run_float8_peer(monkeypatch, inputs, config), run_ours(monkeypatch, inputs, **precision)):
        nan = run.results["output"].isnan()
        assert nan[5].all()
        assert bool(nan[4].any()) == (name == "tensorwise")


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


def test_the_blockwise_peers_eps_is_the_only_formula_of_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    x, w, g = make_inputs(torch.float32, **BLOCKWISE_INPUTS)
    inputs = (x, w, g * 1e-11)  # g has blocks of an amax near 2e-14
    ours = run_ours(monkeypatch, inputs, kind="float8_blockwise").operands["grad_input"]
    assert not same_bits(run_blockwise_peer(monkeypatch, inputs).operands["grad_input"].a_MK, ours.a_MK)
    monkeypatch.setattr(kernels, "EPS", 0.0)
    without = run_blockwise_peer(monkeypatch, inputs).operands["grad_input"]
    assert same_bits(without.a_MK, ours.a_MK)
    assert ((ours.scale_a.double() / without.scale_a.double() - 1).abs() <= 3.01 * 2.0**-24).all()


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


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_int8_the_scales_dtype_costs_its_rounding(dtype: torch.dtype) -> None:
    x = _rows(dtype)
    ours, theirs = OURS(x), OURS._replace(scale_in_input_dtype=True)(x)
    ratio = theirs[1].double()[:-1] / ours[1].double()[:-1]
    bound = torch.full_like(ratio, UNIT[dtype])
    if dtype == torch.float16:  # half of its smallest step, where that is more
        bound = bound.maximum(2.0**-25 / ours[1].double()[:-1])
    if dtype == torch.float32:
        assert torch.equal(theirs[1], ours[1])
    else:
        assert ((ratio - 1).abs() <= bound * (1 + 2.0**-20)).all()
        assert (ratio != 1).any()
    assert torch.equal(theirs[0], ours[0])  # the inverse is another formula
    # The rounded scale in both roles: within half of one of its steps, amax too where 127 * (1 + 2**-8)
    # still rounds to 127.
    q, scale = OURS._replace(scale_in_input_dtype=True, inverse_of_the_scale=True)(x)
    error = (q.double() * scale.double()[:, None] - x.double()).abs()
    good = ratio > 1 / (1 + 2.0**-8)
    assert (error[:-1][good] <= scale.double()[:-1, None][good] * (0.5 + 1e-4)).all()


def test_int8_tiny_float16_is_lost_with_the_scale() -> None:
    x = (randn(8, 64, torch.float32, 0) * 5e-7).half()
    q, scale = quantize_int8_rowwise(x)
    assert (scale == 0).all()  # amax / 127 is below half of float16's smallest number
    assert (q.float() * scale[:, None].float() == 0).all()
    assert sqnr_db(numerics.dequantize(numerics.quantize_rows(x)), x) > 35


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_int8_the_scales_reciprocal_flips_only_ties(dtype: torch.dtype) -> None:
    x = _rows(dtype).float()  # float32: the scale's dtype makes no difference
    ties = torch.arange(126) + 0.5
    x[:, 1:127] = (x.double().abs().amax(1, keepdim=True) / 127 * ties).float()  # as near as float32 has them
    ours, theirs = OURS(x)[0], OURS._replace(inverse_of_the_scale=True, eps=2.0**-126)(x)[0]
    quotient = torch.where(x == 0, 0.0, x.double() * 127 / x.double().abs().amax(1, keepdim=True))
    from_tie = ((quotient - quotient.floor()) - 0.5).abs()
    # fl(1 / fl(amax / 127)) against fl(127 / amax): 3 roundings, and one of each product.
    assert (ours != theirs).any()
    assert (from_tie[ours != theirs] <= 127 * 5 * 2.0**-24).all()
    assert int((ours.int() - theirs.int()).abs().max()) <= 1


def test_int8_eps_touches_rows_below_it_alone() -> None:
    x = randn(200, 64, torch.float32, 0)
    x = (
        x / x.abs().amax(1, keepdim=True) * 127 * torch.logspace(-16, -8, 200)[:, None]
    )  # scales 1e-16 to 1e-8
    with_eps, without = (OURS._replace(inverse_of_the_scale=True, eps=eps)(x)[0] for eps in (EPS, 0.0))
    below = (x.double().abs().amax(1) / 127).float() < EPS
    assert below.any()
    assert torch.equal(with_eps[~below], without[~below])
    # There q is x / eps and not x / scale: smaller by scale / eps, zero in the end, while the scale stays.
    assert torch.equal(with_eps[below].double(), (x[below] * (1 / torch.tensor(EPS))).round().double())
    assert (with_eps[x.abs().amax(1) < EPS / 2] == 0).all()
    # The row's error as a fraction of it: 1 - scale / eps, up to half a step of rounding.
    scale = x[below].double().abs().amax(1) / 127
    values = with_eps[below].double() * scale[:, None]
    assert ((values - x[below].double() * scale[:, None] / EPS).abs() <= scale[:, None] * (0.5 + 1e-4)).all()


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


@NO_CPU_GEMM
@every_dtype
def test_int8_as_it_is_differs_by_less_than_the_noise_of_both(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    inputs = make_inputs(dtype)
    ours = run_ours(monkeypatch, inputs, kind="int8_rowcol", grad_input="column")
    peer = run_int8_peer(monkeypatch, inputs)
    for gemm, mine in ours.operands.items():
        theirs = peer.operands[gemm]
        for q, q_peer, scale, scale_peer in (
            (mine[0], theirs[0], mine[2], theirs[2]),
            (mine[1], theirs[1], mine[3], theirs[3]),
        ):
            if dtype == torch.float32:
                assert torch.equal(scale, scale_peer)
                # Flipped ties: 127 * 5 * 2**-24 to either side of one is 1 in 13,000 values.
                assert int((q != q_peer).sum()) <= q.numel() / 1000
            else:
                assert ((scale_peer.double() / scale.double() - 1).abs() <= UNIT[dtype] * 1.01).all()
                # 127 * 2**-8 is half a step: a number moves by one at most.
                assert int((q.int() - q_peer.int()).abs().max()) <= 1


@NO_CPU_GEMM
def test_int8_eps_costs_the_peer_its_small_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, g = make_inputs(torch.float32)
    for magnitude, is_lost in ((1e-9, False), (1e-10, True), (1e-12, True)):
        inputs = (x, w, g / g.abs().max() * magnitude)
        truth = truth_of(inputs)["grad_input"]
        peer = run_int8_peer(monkeypatch, inputs).results["grad_input"]
        ours = run_ours(monkeypatch, inputs, kind="int8_rowcol", grad_input="column").results["grad_input"]
        # The peer's row of amax a comes out as a / 1.27e-10 of itself, once a is below 1.27e-10.
        assert (sqnr_db(peer, truth) < 10) == is_lost
        noise = noise_of((inputs[2], 1, INT8, False), (w, 0, INT8, False))
        assert relative_error(ours, truth) <= 1.05 * noise


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_int8_what_is_not_finite_is_nan_with_us(monkeypatch: pytest.MonkeyPatch, bad: float) -> None:
    inputs = make_inputs(torch.float32)
    inputs[0][5, 7] = bad
    ours = run_ours(monkeypatch, inputs, kind="int8_rowcol", grad_input="column").results["output"]
    assert ours[5].isnan().all()
    assert ours[[4, 6]].isfinite().all()
    peer = run_int8_peer(monkeypatch, inputs, scaled_int8_mm=exact_epilogue).results["output"]
    # The peer's row is inf or NaN as well: its scale is, and no finite number comes of that.
    assert (~peer[5].isfinite()).all()


def test_the_int8_default_without_module_swap_still_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Why the tests above swap modules. When this fails, torchao has mended it, and they may drop the switch.
    x, w, g = make_inputs(torch.float32)
    calls: list[Tensor] = []
    monkeypatch.setattr(ao_int8, "scaled_int8_mm", lambda *operands: calls.append(operands[0]))
    model = layer(w)
    quantize_(model, ao_int8.Int8MixedPrecisionTrainingConfig())
    assert torch.equal(forward_backward(model, x, g)["output"], x @ w.t())
    assert not calls
