"""Predicts the time of a training step on a GPU that is not here, from counted bytes and FLOPs. Nothing here
is measured.

A step is a sum of parts that do not overlap: FLOPs at a rate, bytes at the bandwidth. The operations of the
linear layers are counted on fake tensors (traffic.py). The other parts are the formulas of `parts`; their
terms say what is read and written. The rates are assumptions for one H200, each with its reason; the first
runs on a GPU will replace them. Another GPU is taken to reach the same share of its peaks and of its
bandwidth, which is a weaker assumption the less the GPU is like Hopper. There are two numbers for kinds that
lptune's own kernels multiply: at the rate that was assumed before the machine code was read, and at that of a
library.

A prediction says which part to work on. Its error is about 20 % on Hopper, and unknown elsewhere.
"""

import math
from typing import Any, NamedTuple

from lptune import models
from lptune.hardware.devices import Device, named_device
from lptune.plan.traffic import layer_traffic

REFERENCE = named_device("h200")
BANDWIDTH = 4.1e12  # bytes/s: 85 % of the H200's 4.8e12, as copies reach on Hopper
BF16 = 700e12  # FLOP/s: 71 % of 989e12, as cuBLAS reaches in large GEMMs
LIBRARY = 1200e12  # 61 % of 1,979e12: cuBLASLt in float8; less of the peak than bf16, for power
# Our kernels. The products of a step take 512 cycles (tile 128 x 128, step 128) or 1,024; after them, wait,
# barriers and the start of the next load take about 230, in which float8 also adds 64 numbers a thread.
OUR_INT8 = (1150e12, 1200e12)
OUR_FLOAT8 = (800e12, 1000e12)
OUR_BLOCKS = (600e12, 800e12)  # also multiplies each sum by its scales
FLASH = (400e12, 330e12)  # flash attention 2 on Hopper, forward and backward
RATES: dict[str, dict[str, tuple[float, float]]] = {
    "none": {"forward": (BF16, BF16), "backward": (BF16, BF16)},
    "int8_rowcol": {"forward": OUR_INT8, "backward": OUR_INT8},
    # `output` runs in a library. Backward too with LPTUNE_TRY=cublaslt_rowwise: the second number.
    "float8_rowwise": {"forward": (LIBRARY, LIBRARY), "backward": (OUR_FLOAT8[0], LIBRARY)},
    "float8_tensorwise": {"forward": (LIBRARY, LIBRARY), "backward": (LIBRARY, LIBRARY)},
    # LPTUNE_TRY=cublaslt_blocks: the second number.
    "float8_blockwise": {"forward": (OUR_BLOCKS[0], 1000e12), "backward": (OUR_BLOCKS[0], 1000e12)},
}
_FORMATS = dict.fromkeys(RATES, "e4m3") | {"none": "bf16", "int8_rowcol": "int8"}
LOGITS_PER_CHUNK = 2**27


class Part(NamedTuple):
    """Milliseconds of one part of a step, at the two rates of RATES: (cautious, hopeful)."""

    name: str
    ms: tuple[float, float]


class Scale(NamedTuple):
    """How much faster a device is than REFERENCE."""

    bandwidth: float
    bf16: float
    gemm: float
    """In the format of the kind."""


def predictable(device: Device) -> list[str]:
    """The kinds that `parts` can predict for `device`, `none` first. Empty if its figures are not known."""
    if device.bandwidth is None:
        return []
    return [kind for kind, fmt in _FORMATS.items() if device.peak(fmt) is not None]


def parts(
    kind: str,
    config: models.Facts,
    tokens: int,
    seq_len: int,
    device: Device = REFERENCE,
    *,
    num_micro_batches: int = 1,
    num_ranks: int = 1,
) -> list[Part]:
    """The parts of a step on one `device`, with micro-batches of `tokens` tokens in rows of one document of
    `seq_len`. Of several ranks each updates its share of the weights; their exchange has no part here.

    kind: one of `predictable(device)`.
    """
    scale = _scale(kind, device)
    traffic = layer_traffic(kind, config, tokens, seq_len, device)
    entries = [each for each in traffic if not each.repeated]
    bandwidth = BANDWIDTH * scale.bandwidth
    n, hidden, vocab = len(config.layers), config.hidden_size, config.vocab_size
    heads, head_dim = config.num_heads, config.head_dim
    qk = (heads + config.num_kv_heads) * head_dim
    weights = sum(math.prod(each.sizes[1:]) for each in entries if each.phase == "forward" and each.sizes)
    head = vocab * hidden
    parameters = n * weights + head * (1 if config.tied else 2)

    def bytes_of(what: str, phases: tuple[str, ...] = ("forward", "backward")) -> float:
        return float(sum(each.moved for each in entries if each.what == what and each.phase in phases))

    def layer_ms(bytes_of_layer: float) -> tuple[float, float]:
        return _same(1e3 * n * bytes_of_layer / bandwidth)

    def per_step(ms: tuple[float, float]) -> tuple[float, float]:
        return _same(ms[0] / num_ranks)

    def per_pass(ms: tuple[float, float]) -> tuple[float, float]:
        return ms[0] * num_micro_batches, ms[1] * num_micro_batches

    flops = {
        phase: sum(2.0 * math.prod(each.sizes) for each in entries if each.phase == phase and each.sizes)
        for phase in ("forward", "backward")
    }
    gemm = [
        1e3 * n * sum(flops[phase] / (RATES[kind][phase][i] * scale.gemm) for phase in flops) for i in (0, 1)
    ]
    attention = 4.0 * head_dim * heads * tokens * (seq_len + 1) / 2
    chunks = math.ceil(tokens * vocab / LOGITS_PER_CHUNK)
    # Fused by the compiler, of each token in bfloat16. Norms, with the residual sums before and after: 20
    # vectors of the hidden size read or written; rotations: 4 of q and k; gate and up: 9 of the MLP.
    elementwise = 2.0 * tokens * (20 * hidden + 4 * qk + 9 * config.intermediate_size)
    flash = 1e3 * n * (attention / FLASH[0] + 2.5 * attention / FLASH[1]) / scale.bf16
    of_a_pass = [
        Part("linear layers", (gemm[0], gemm[1])),
        Part("quantizers", layer_ms(bytes_of("quantize"))),
        Part("transposes", layer_ms(bytes_of("copy"))),
        Part("attention", _same(flash)),
        Part("elementwise", layer_ms(elementwise)),
        Part("head", _same(1e3 * 6 * tokens * head / (BF16 * scale.bf16))),
        # Reads logits twice, writes their gradient: compiled, in bfloat16, of each chunk.
        Part("loss", _same(1e3 * 6 * tokens * vocab / bandwidth)),
        # Of each chunk: reads the gradient in bfloat16, reads and writes the sum in float32.
        Part("sum of the head's gradient", _same(1e3 * 10 * head * chunks / bandwidth)),
        Part("gradients", _same(1e3 * 6 * parameters / bandwidth)),  # bfloat16 read, float32 written
    ]
    of_an_update = [
        Part("weights", layer_ms(_weight_bytes(kind, entries, weights, head))),
        Part("norm and clipping", _same(1e3 * 12 * parameters / bandwidth)),
        Part("AdamW", _same(1e3 * 28 * parameters / bandwidth)),  # reads g, w, m, v; writes w, m, v
    ]
    return [
        *(Part(name, per_pass(ms)) for name, ms in of_a_pass),
        *(Part(name, per_step(ms)) for name, ms in of_an_update),
    ]


def _scale(kind: str, device: Device) -> Scale:
    peak, reference = device.peak(_FORMATS[kind]), REFERENCE.peak(_FORMATS[kind])
    assert REFERENCE.bandwidth
    assert reference
    assert peak, "ask predictable()"
    assert device.bandwidth, "ask predictable()"
    bandwidth = device.bandwidth / REFERENCE.bandwidth
    return Scale(bandwidth, device.bf16 / REFERENCE.bf16, peak / reference)


def _same(ms: float) -> tuple[float, float]:
    return ms, ms


def _weight_bytes(kind: str, entries: list[Any], weights: int, head: int) -> float:
    """Bytes for the compute weights of a layer, once in a step. The embedding is cast to bfloat16."""
    if kind == "none":
        return 6.0 * weights
    return float(sum(each.moved for each in entries if each.phase == "weights" and each.read != 4 * head))


def total(found: list[Part]) -> tuple[float, float]:
    """Milliseconds of the step, cautious and hopeful."""
    return sum(each.ms[0] for each in found), sum(each.ms[1] for each in found)


def linear_ms(found: list[Part]) -> float:
    """Cautious milliseconds of the linear layers of a step, with what is quantized for them."""
    names = ("linear layers", "quantizers", "transposes", "weights")
    return sum(each.ms[0] for each in found if each.name in names)
