"""What every kind of precision owes the rest of the library, and that nothing else knows kinds by name."""

import ast
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lptune import linear
from lptune.config import PRECISION_KINDS, PrecisionConfig
from lptune.kernels import GEMMS, Quantized, pack_rows
from lptune.kernels.backend import BACKENDS
from lptune.linear import KINDS, GatheredWeight, Kind, LinearSpec
from lptune.linear.kind import Needs, Shard
from lptune.linear.weights.weight_amax import shard_amaxes
from tests.helpers import cold

LIBRARY = Path(linear.__file__).parents[1]
NAMED_IN = {
    "config/precision.py",  # the list of names and keys
    "config/elsewhere.py",  # what other trainers' names are here, for messages
    "config/schema.py",  # a format of exports that is called like its kind
    "config/recipes.py",  # the two ways to store a teacher
    "plan/from_counts.py",  # the rates of a GPU that is not here, by kind
    "plan/traffic.py",  # the kinds whose bytes the model of a GPU knows
    "training/first_loss.py",  # the kind that it recommends
    "tools/migrate/draft.py",
    "tools/migrate/trainer.py",  # what other trainers' settings are here
    "tools/migrate/torchtune.py",
}
T, K, N, NUM_RANKS = 96, 160, 176, 3
"""Blocks of 128 end inside the shards of 59, 59 and 58 rows; 32 tokens to a rank."""


def test_each_kind_of_the_config_has_its_class_and_each_class_its_kind() -> None:
    assert list(KINDS) == list(PRECISION_KINDS)[1:]
    for name, kind in KINDS.items():
        assert kind.name == name
        assert (type(kind).__doc__ or "").startswith(f"`{name}`")
        assert kind.keys is PRECISION_KINDS[name]
    assert len({type(kind) for kind in KINDS.values()}) == len(KINDS)


def _modules() -> list[tuple[str, ast.Module]]:
    return [
        (path.relative_to(LIBRARY).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(LIBRARY.rglob("*.py"))
    ]


def test_no_module_but_the_config_and_its_own_file_names_a_kind() -> None:
    found = [
        f"{file}:{node.lineno}: {node.value}"
        for file, module in _modules()
        if file not in NAMED_IN and not file.startswith("linear/kinds/")
        for node in ast.walk(module)
        if isinstance(node, ast.Constant) and node.value in KINDS
    ]
    assert not found, "ask spec.kind instead: " + "; ".join(found)


def test_copies_and_pickles_of_a_spec_have_the_kind_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in KINDS.items():
        spec = LinearSpec.from_config(PrecisionConfig(kind=name))
        for same in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
            assert same == spec
            assert same.kind is kind
    pickled = pickle.dumps(spec)
    monkeypatch.delitem(KINDS, name)
    with pytest.raises(KeyError, match=name):
        pickle.loads(pickled)


def test_the_import_fails_where_the_config_has_other_kinds_and_says_where() -> None:
    change = "p['ghost'] = p.pop('mxfp8')"
    done = cold.run("-c", f"from lptune.config import PRECISION_KINDS as p; {change}; import lptune.linear")
    assert "ImportError: ghost, mxfp8: a kind has a row in PRECISION_KINDS" in done.stderr


def _is_integer(kind: Kind) -> bool:
    return kind.fmt in ("int8", "int4")


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_it_says_what_it_needs_of_a_device(kind: Kind) -> None:
    assert set(kind.operations) <= set(BACKENDS)
    assert kind.keys.needs_float8 == (not _is_integer(kind) and not kind.emulated_where_missing)


def _precision(kind: Kind, **keys: Any) -> PrecisionConfig:
    return PrecisionConfig(kind=kind.name, emulate=not _is_integer(kind), **keys)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_plan_says_the_formats_of_what_is_low_and_high_of_the_rest(kind: Kind) -> None:
    spec = LinearSpec.from_config(_precision(kind))
    for gemm in GEMMS:
        described = spec.describe(gemm)
        if spec.is_low(gemm):
            assert kind.fmt in described
            assert spec._replace(**{gemm: "high"}).describe(gemm) == "high"
        else:
            assert described == "high"
    assert spec.describe_gather().startswith(kind.fmt) == kind.keys.can_gather_low


def _operands(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(size, generator=generator).to(dtype) for size in ((T, K), (N, K), (T, N)))
    w[150, 20] = 9.0  # the last shard has the largest element of the weight
    x[5, 7] = 11.0
    return x, w, g


def _gemms(kind: Kind, spec: LinearSpec, w_NK: Tensor, quantized_x: Quantized | None = None) -> list[Tensor]:
    x, _, g = _operands()
    handle = torch.tensor([-1, 0, 0, 0])
    seen = x.new_zeros(()).expand_as(x) if quantized_x else x
    out, saved = kind.forward(spec, seen, w_NK, handle, quantized_x)
    gx, gw = kind.backward(spec, g, w_NK, saved, handle, Needs(True, True))
    assert gx is not None
    assert gw is not None
    return [out, gx, gw]


GATHERED = [kind for kind in KINDS.values() if kind.keys.can_gather_low and not kind.keys.stores_low]


@pytest.mark.parametrize("kind", GATHERED, ids=lambda kind: kind.name)
def test_a_weight_in_shards_is_the_weight_to_the_bit(kind: Kind) -> None:
    spec = LinearSpec.from_config(_precision(kind))
    w_NK = _operands()[1]
    starts = range(0, N, -(-N // NUM_RANKS))
    shards = [
        Shard(w_NK[at : at + starts.step], at, N, kind.weight_block, w_NK.dtype, kind.mean_scale)
        for at in starts
    ]
    asked = list[Tensor]()

    def agree(mine: Tensor) -> Tensor:
        asked.append(mine)
        return torch.stack([shard_amaxes([shard])[0] for shard in shards]).amax(0)

    parts = [kind.quantize_shard(spec, shard, agree) for shard in shards]
    assert len(asked) == (0 if kind.row_scales else NUM_RANKS)
    scale = torch.cat([part.scale for part in parts]) if kind.row_scales else parts[0].scale
    whole = Quantized(torch.cat([part.q_NK for part in parts]), scale)
    gathered = GatheredWeight(*whole, dtype=w_NK.dtype, block=kind.weight_block, rotated=kind.rotated)
    for plain, low in zip(_gemms(kind, spec, w_NK), _gemms(kind, spec, gathered), strict=True):
        assert torch.equal(plain, low)


@pytest.mark.parametrize("kind", GATHERED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_packed_shard_has_the_bits_of_the_quantized_shard_in_compute_dtype(
    kind: Kind, dtype: torch.dtype
) -> None:
    spec, w_NK = LinearSpec.from_config(_precision(kind)), _operands()[1].to(torch.float32) * (1 + 2.0**-9)
    first, num_rows = N // 3, N - N // 3 + 2

    def agree(_: torch.Tensor) -> torch.Tensor:
        return shard_amaxes([Shard(w_NK, 0, N, kind.weight_block, dtype, kind.mean_scale)])[0]

    def shard(rows_MK: torch.Tensor) -> Shard:
        return Shard(rows_MK, first, N, kind.weight_block, dtype, kind.mean_scale)

    expected = kind.quantize_shard(spec, shard(w_NK[first:].to(dtype)), agree)
    quantized = kind.quantize_shard(spec, shard(w_NK[first:]), agree)
    assert torch.equal(quantized.q_NK.view(torch.uint8), expected.q_NK.view(torch.uint8))
    assert torch.equal(quantized.scale, expected.scale)
    buffer, scale = kind.pack_shard(spec, shard(w_NK[first:]), agree, num_rows)
    assert torch.equal(buffer, pack_rows(expected, num_rows, kind.header_bytes))
    assert kind.row_scales if scale is None else torch.equal(scale, expected.scale)


TOKENS = [kind for kind in KINDS.values() if kind.keys.tokens_low]


@pytest.mark.parametrize("kind", TOKENS, ids=lambda kind: kind.name)
def test_tokens_that_ranks_quantized_give_the_bits_of_all_tokens(kind: Kind) -> None:
    assert kind.keys.tokens_low is not None
    grad_weight = kind.keys.tokens_low if kind.keys.tokens_low != kind.keys.grad_weight[0] else "low"
    spec = LinearSpec.from_config(_precision(kind, grad_weight=grad_weight))
    assert spec.token_gather == "auto"
    assert spec.described_tokens.startswith(kind.fmt)
    x_TK, w_NK, _ = _operands()
    asked = list[Tensor]()

    def agree(mine: Tensor) -> Tensor:
        asked.append(mine)
        return x_TK.abs().amax().float().view(1, 1)

    parts = [kind.quantize_tokens(spec, part, agree) for part in x_TK.chunk(NUM_RANKS)]
    assert len(asked) == (0 if kind.row_scales else NUM_RANKS)
    scale = torch.cat([part.scale for part in parts]) if kind.row_scales else parts[0].scale
    quantized_x = Quantized(torch.cat([part.q_NK for part in parts]), scale)
    for plain, low in zip(_gemms(kind, spec, w_NK), _gemms(kind, spec, w_NK, quantized_x), strict=True):
        assert torch.equal(plain, low)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_layer_becomes_what_the_kind_says_and_a_plain_one_again(kind: Kind) -> None:
    model = nn.Sequential(nn.Linear(K, N))
    linear.convert(model, _precision(kind))
    assert type(model[0]) is (kind.layer_class or linear.LowPrecisionLinear)
    assert (linear.int8_rows(model[0].weight) is not None) == kind.keys.stores_low
    linear.unconvert(model)
    assert type(model[0]) is nn.Linear
