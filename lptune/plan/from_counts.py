"""Predicts the time of a training step on a GPU that is not here, from counted bytes and FLOPs.

A step is a sum of parts that do not overlap: FLOPs at a rate, bytes at the bandwidth. The operations of the
linear layers are counted on fake tensors (traffic.py). The other parts are the formulas of `parts`; their
terms say what is read and written. The rates are those of one training step of Llama 3.2 3B on an H100
(docs/gpu.md), where GEMMs run faster than alone. Another GPU is taken to reach the same share of its peaks
and of its bandwidth, which is a weaker assumption the less the GPU is like Hopper. There are two numbers
where lptune's kernel was measured in one form, and derived or assumed in another. Of updates only AdamW's in
float32 ran on a GPU; another optimizer.kind or optimizer.master is taken to reach its bandwidth with the
bytes that its operators move (traffic.update_traffic). With optimizer.in_backward the same bytes are moved.

A prediction says which part to work on. It has no part for a GPU that waits for the host, nor for launches.
"""

import math
from typing import Any, NamedTuple

from lptune import models
from lptune.config import OptimizerConfig
from lptune.hardware.devices import Device, named_device
from lptune.plan.traffic import layer_traffic, update_traffic
from lptune.training import muon

REFERENCE = named_device("h100")
BANDWIDTH = 2.86e12  # bytes/s: what a copy reached, 85 % of 3.35e12
# Of that, what kernels reached within the step.
QUANTIZERS, ELEMENTWISE, ADAMW = 0.84, 0.64, 0.8
# Quantizers that rotate: what is left of the kernels of a measured step (500 ms) if all others take as long
# as in int8_rowcol's (465 ms).
ROTATING = 0.69
BF16 = 900e12  # FLOP/s: 919e12 in the layers, 869e12 in the head
INT8 = 1640e12  # the kernel in Gluon
LIBRARY = 1540e12  # cuBLASLt in float8: 1543e12 with one scale, 1522e12 with row scales and fast sums
# Measured with tl.dot. With the kernel in Gluon: what is left of a step in which it ran `output`, too, if
# that took as long as cuBLASLt's.
OUR_FLOAT8 = (1137e12, 1400e12)
OUR_BLOCKS = (850e12, 1050e12)  # not measured: three quarters, since each sum is multiplied by its scales
FLASH = (306e12, 262e12)  # flash attention 2, forward and backward
RATES: dict[str, dict[str, tuple[float, float]]] = {
    "none": {"forward": (BF16, BF16), "backward": (BF16, BF16)},
    "int8_rowcol": {"forward": (INT8, INT8), "backward": (INT8, INT8)},
    "int8_rotated": {"forward": (INT8, INT8), "backward": (INT8, INT8)},
    "float8_rowwise": {"forward": (LIBRARY, LIBRARY), "backward": OUR_FLOAT8},
    "float8_tensorwise": {"forward": (LIBRARY, LIBRARY), "backward": (LIBRARY, LIBRARY)},
    "float8_blockwise": {"forward": OUR_BLOCKS, "backward": OUR_BLOCKS},
}
_FORMATS = dict.fromkeys(RATES, "e4m3") | {"none": "bf16", "int8_rowcol": "int8", "int8_rotated": "int8"}
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
    optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008  (frozen)
) -> list[Part]:
    """The parts of a step on one `device`, with micro-batches of `tokens` tokens in rows of one document of
    `seq_len`. Of several ranks each updates its share of the weights; their exchange has no part here.

    kind: one of `predictable(device)`.
    """
    scale = _scale(kind, device)
    width = 2 if optimizer.master == "none" else 4  # bytes of a weight that is updated, and of its gradient
    traffic = layer_traffic(kind, config, tokens, seq_len, device)
    entries = [each for each in traffic if not each.repeated]
    bandwidth = BANDWIDTH * scale.bandwidth
    quantizers = ROTATING if kind == "int8_rotated" else QUANTIZERS
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
        Part("quantizers", layer_ms(bytes_of("quantize") / quantizers)),
        Part("transposes", layer_ms(bytes_of("copy"))),
        Part("attention", _same(flash)),
        Part("elementwise", layer_ms(elementwise / ELEMENTWISE)),
        Part("head", _same(1e3 * 6 * tokens * head / (BF16 * scale.bf16))),
        # Reads logits twice, writes their gradient: compiled, in bfloat16, of each chunk.
        Part("loss", _same(1e3 * 6 * tokens * vocab / bandwidth)),
        # Of each chunk: reads the gradient in bfloat16, reads and writes the sum in float32.
        Part("sum of the head's gradient", _same(1e3 * 10 * head * chunks / bandwidth)),
        # bfloat16 read, float32 written; without masters only those of more micro-batches are added.
        Part("gradients", _same(1e3 * 6 * parameters * (width == 4 or num_micro_batches > 1) / bandwidth)),
    ]
    of_an_update = [
        Part(
            "weights", layer_ms(_weight_bytes(kind, entries, weights, head) * (kind != "none" or width == 4))
        ),
        Part("norm and clipping", _same(1e3 * 3 * width * parameters / bandwidth)),
        Part(
            "Muon" if optimizer.kind == "muon" else "AdamW",
            _same(1e3 * update_traffic(optimizer) * parameters / (bandwidth * ADAMW)),
        ),
    ]
    if optimizer.kind == "muon":
        shapes = (each.sizes[1:] for each in entries if each.phase == "forward" and each.sizes)
        products = n * sum(muon.flops(*shape) for shape in shapes)
        of_an_update.append(Part("products of Muon", _same(1e3 * products / (BF16 * scale.bf16))))
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
