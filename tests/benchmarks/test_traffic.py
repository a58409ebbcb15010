"""Launches and bytes of a decoder layer, forward and backward: exactly what its kind needs, and no copy more.

The formulas say what is necessary. Each operand is written once in 8 bits, where a GEMM wants it; x is
quantized once for all layers that read it; g once for both of its GEMMs. Two terms are not necessary and are
written down as such: a quantizer that needs the amax of a column or of a tensor reads its input twice, and
the 8-bit weight, which forward has row by row, is copied for grad_input.

T tokens; K, N: in_features and out_features of a linear layer.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from lptune import linear, models
from lptune.config import OptimizerConfig, PrecisionConfig
from lptune.linear.kinds import rowwise
from lptune.plan import from_counts
from lptune.plan.traffic import one_gpu, update_traffic

T, SEQ_LEN = 256, 64
LOW = ("int8_rowcol", "float8_rowwise", "float8_tensorwise", "float8_blockwise")


@pytest.fixture(scope="module")
def traffic(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("traffic")


@pytest.fixture(scope="module")
def entries_of(traffic: ModuleType) -> Callable[[str], list[Any]]:
    config = traffic.config_of("llama3_2/tiny")
    return cache(lambda kind: traffic.layer_traffic(kind, config, T, SEQ_LEN))


@pytest.fixture(scope="module")
def layers(traffic: ModuleType) -> list[tuple[int, int]]:
    """(K, N) of the seven linear layers."""
    config = traffic.config_of("llama3_2/tiny")
    hidden, mlp = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, mlp), (hidden, mlp), (mlp, hidden)]


@pytest.fixture(scope="module")
def inputs(layers: list[tuple[int, int]]) -> list[int]:
    """K of the four different inputs: that of q, k and v; of o; of gate and up; of down."""
    return [layers[index][0] for index in (0, 3, 4, 6)]


def _blocks(size: int) -> int:
    return -(-size // 128)


def _gemm_bytes(kind: str, k: int, n: int) -> tuple[int, int]:
    """Bytes of `output`, and of grad_input and grad_weight together."""
    if kind == "none":
        once = 2 * (T * k + n * k + T * n)
        return once, 2 * once
    operands_and_results = (T * k + n * k + 2 * T * n, T * n + n * k + 2 * T * k, T * n + T * k + 2 * n * k)
    scales = {
        # grad_input needs no scale of W, which g has taken in.
        "rowwise": (T + n, T, n + k),
        "tensorwise": (2, 2, 2),
        "blockwise": (
            T * _blocks(k) + _blocks(n) * _blocks(k),
            T * _blocks(n) + _blocks(n) * _blocks(k),
            _blocks(T) * (n + k),
        ),
    }[_family(kind)]
    output, *backward = (a + 4 * b for a, b in zip(operands_and_results, scales, strict=True))
    return output, sum(backward)


def _family(kind: str) -> str:
    return "rowwise" if kind == "int8_rowcol" else kind.removeprefix("float8_")


def _quantize_bytes(kind: str, layers: list[tuple[int, int]], inputs: list[int]) -> tuple[int, int]:
    """Bytes of the quantizers in forward, and in backward: read in 16 bits, written in 8."""
    family = _family(kind)
    if family == "rowwise":
        forward = sum(2 * T * k + T * k + 4 * T for k in inputs)
        # Twice: g with the scales of W that it takes in, and x by columns.
        g = sum(2 * (2 * T * n + 4 * n) + 2 * T * n + 4 * T + 4 * n for _, n in layers)
        x = sum(2 * 2 * T * k + T * k + 4 * k for k in inputs)
    elif family == "tensorwise":
        forward = x = sum(2 * 2 * T * k + T * k + 4 for k in inputs)
        g = sum(2 * 2 * T * n + 2 * T * n + 4 for _, n in layers)
    else:
        forward = sum(2 * T * k + T * k + 4 * T * _blocks(k) for k in inputs)
        g = sum(2 * T * n + 2 * T * n + 4 * T * _blocks(n) + 4 * _blocks(T) * n for _, n in layers)
        x = sum(2 * T * k + T * k + 4 * _blocks(T) * k for k in inputs)
    return forward, g + x


QUANTIZE_LAUNCHES = {
    # forward: four inputs; backward: seven gradients and four inputs. Two phases and their zeros are three.
    "rowwise": (4, 3 * 7 + 3 * 4),
    "tensorwise": (3 * 4, 3 * 7 + 3 * 4),
    "blockwise": (4, 7 + 4),
}


@pytest.mark.parametrize("kind", LOW)
def test_a_layer_moves_the_bytes_that_its_kind_needs(
    kind: str,
    traffic: ModuleType,
    entries_of: Callable[[str], list[Any]],
    layers: list[tuple[int, int]],
    inputs: list[int],
) -> None:
    found = traffic.totals(entries_of(kind))
    forward, backward = (sum(each) for each in zip(*(_gemm_bytes(kind, *one) for one in layers), strict=True))
    assert found["forward", "gemm"] == (7, forward)
    assert found["backward", "gemm"] == (14, backward)
    in_forward, in_backward = _quantize_bytes(kind, layers, inputs)
    launches = QUANTIZE_LAUNCHES[_family(kind)]
    assert found["forward", "quantize"] == (launches[0], in_forward)
    assert found["backward", "quantize"] == (launches[1], in_backward)
    # The one copy: W in 8 bits, for grad_input.
    assert found.get(("forward", "copy")) is None
    assert found["backward", "copy"] == (7, sum(2 * n * k for k, n in layers))


def test_a_layer_in_bfloat16_copies_nothing(
    traffic: ModuleType, entries_of: Callable[[str], list[Any]], layers: list[tuple[int, int]]
) -> None:
    found = traffic.totals(entries_of("none"))
    forward, backward = (
        sum(each) for each in zip(*(_gemm_bytes("none", *one) for one in layers), strict=True)
    )
    assert found["forward", "gemm"] == (7, forward)
    assert found["backward", "gemm"] == (14, backward)
    assert not [key for key in found if key[0] != "weights" and key[1] in ("copy", "quantize")]


@pytest.mark.parametrize("kind", LOW)
def test_a_kind_adds_nothing_elementwise(
    kind: str, traffic: ModuleType, entries_of: Callable[[str], list[Any]]
) -> None:
    ours, high = (traffic.totals(entries_of(each)) for each in (kind, "none"))
    for phase in ("forward", "backward"):
        for what in ("elementwise", "attention"):
            assert ours[phase, what] == high[phase, what], (phase, what)


@pytest.mark.parametrize("kind", ["int8_rowcol", "float8_rowwise"])
def test_a_weight_with_row_scales_is_read_in_float32_and_written_in_8_bits(
    kind: str,
    traffic: ModuleType,
    entries_of: Callable[[str], list[Any]],
    layers: list[tuple[int, int]],
) -> None:
    found = traffic.totals(entries_of(kind))
    assert found["weights", "quantize"] == (7, sum(4 * n * k + n * k + 4 * n for k, n in layers))
    assert ("weights", "copy") not in found


@pytest.mark.parametrize("kind", ["float8_tensorwise", "float8_blockwise"])
def test_a_weight_of_tensor_or_blocks_is_read_twice_in_float32_and_written_in_8_bits(
    kind: str,
    traffic: ModuleType,
    entries_of: Callable[[str], list[Any]],
    layers: list[tuple[int, int]],
) -> None:
    """Its amaxes are measured first, since ranks have to agree on them; then it is quantized by them."""
    scales = [1 if kind == "float8_tensorwise" else _blocks(k) * _blocks(n) for k, n in layers]
    measured = [(4 * n * k, 4 * count) for (k, n), count in zip(layers, scales, strict=True)]
    quantized = [(4 * n * k + 4 * c, n * k + 4 * c) for (k, n), c in zip(layers, scales, strict=True)]
    entries = [each for each in entries_of(kind) if each.phase == "weights"]

    def found(name: str) -> list[tuple[int, int]]:
        return [(each.read, each.written) for each in entries if each.name == name]

    assert found("_foreach_norm" if kind == "float8_tensorwise" else "block_amaxes") == measured
    assert found("quantize_by_amax") == quantized
    launches = 7 if kind == "float8_tensorwise" else 14  # torch measures tensors
    assert traffic.totals(entries)["weights", "quantize"][0] == launches
    others = [each for each in entries if each.name not in ("_foreach_norm", "block_amaxes")]
    large = [each for each in others if each.moved > 8 * 32 * 64 and each.what != "quantize"]
    assert {each.name for each in large} <= {"_to_copy"}  # the embedding, which stays in bfloat16


def test_the_compiler_runs_a_repeated_operation_once(traffic: ModuleType) -> None:
    """What `totals` assumes, on an MLP: gate and up read one x. AOTAutograd's graphs, executed on the CPU."""
    graphs: list[Counter[str]] = []

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return make_boxed_func(graph.forward)

    config = traffic.config_of("llama3_2/tiny")
    with one_gpu() as world:
        model = models.build_on_meta(config)
        linear.convert(model, PrecisionConfig(kind="int8_rowcol"), device=torch.device("cuda"), num_tokens=T)
        linear.gather_in_8_bits(model, torch.bfloat16)
        model.to_empty(device="cpu")
        model.init_weights(0)
        mlp = model.model.layers[0].mlp
        linear.use_compute_weights(mlp, torch.bfloat16, world.mesh)
        backend = aot_autograd(
            fw_compiler=record, bw_compiler=record, partition_fn=min_cut_rematerialization_partition
        )  # as Inductor
        mlp.forward = torch.compile(mlp.forward, backend=backend, fullgraph=True)
        x = torch.randn(2, SEQ_LEN, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        mlp(x).sum().backward()
    torch._dynamo.reset()
    assert len(graphs) == 2
    # Both graphs together: the partitioner may move a quantizer of x into forward, to save 8 bits.
    found = {name: n for name, n in sum(graphs, Counter()).items() if "lptune" in name or "clone" in name}
    assert found == {
        "lptune.quantize_rows.default": 2,  # x of gate and up, x of down
        "lptune.quantize_columns.default": 2,
        "lptune.quantize_rows_and_columns.default": 3,
        "lptune.scaled_mm.default": 9,
        "aten.clone.default": 3,  # W in 8 bits, as above
    }


def test_a_copy_that_someone_adds_is_found(
    traffic: ModuleType, entries_of: Callable[[str], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = traffic.totals(entries_of("int8_rowcol"))
    mm = rowwise.scaled_mm
    monkeypatch.setattr(rowwise, "scaled_mm", lambda a, *rest, **more: mm(a.clone(), *rest, **more))
    config = traffic.config_of("llama3_2/tiny")
    after = traffic.totals(traffic.layer_traffic("int8_rowcol", config, T, SEQ_LEN))
    # Of four inputs: q, k and v read one, gate and up read one, and a copy of the same counts once.
    assert after["forward", "copy"][0] == 4
    assert after["backward", "copy"][0] == before["backward", "copy"][0] + 14


def test_an_update_moves_at_least_what_is_stored() -> None:
    """Weights, gradients and moments of 4 bytes are read and written by one kernel; others around it, too."""
    assert update_traffic(OptimizerConfig()) == 4 * 7  # reads g, w, m, v; writes w, m, v
    assert update_traffic(OptimizerConfig(kind="sgd")) == 4 * 3
    assert update_traffic(OptimizerConfig(kind="sgd", momentum=0.9)) == 4 * 5
    for kind, num_bytes in (("adamw_bf16", 2), ("adamw_8bit", 1)):
        decoded_and_encoded = 2 * (num_bytes + 4) + 2 * (4 + num_bytes)
        with_masters = update_traffic(OptimizerConfig(kind=kind))
        assert with_masters >= 28 + decoded_and_encoded
        # The weight and the gradient, too: read in bfloat16 and written in float32, and the weight back.
        without = update_traffic(OptimizerConfig(kind=kind, master="none"))
        assert without >= with_masters + 2 * (2 + 4) + (4 + 2)


def test_a_prediction_is_of_the_config_s_optimizer() -> None:
    tiny = models.config_from_dict(models.PRESETS["llama3_1"]["tiny"], "test")

    def ms(**keys: Any) -> dict[str, float]:
        found = from_counts.parts("none", tiny, 64, 64, optimizer=OptimizerConfig(**keys))
        return {part.name: part.ms[0] for part in found}

    adamw, low = ms(), ms(kind="adamw_8bit", master="none")
    assert low["AdamW"] > adamw["AdamW"]
    assert low["norm and clipping"] == adamw["norm and clipping"] / 2  # gradients of 2 bytes
    assert (low["weights"], low["gradients"]) == (0, 0)  # bfloat16 weights are their own compute weights
    same = ("linear layers", "attention", "head", "loss")
    assert {name: low[name] for name in same} == {name: adamw[name] for name in same}
