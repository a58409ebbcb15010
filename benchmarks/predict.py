"""Predicts the time of a training step on one H200 from counted bytes and FLOPs. Nothing here is measured.

    python benchmarks/predict.py [--preset llama3_2/3b ...] [--tokens 8192 16384] [--json FILE]

A step is a sum of parts that do not overlap: FLOPs at a rate, bytes at the bandwidth. The operations of the
linear layers are counted on fake tensors (traffic.py). The other parts are the formulas of `parts`; their
terms say what is read and written. RATES are assumptions, each with its reason; the first runs on a GPU will
replace them. The table has two numbers for kinds that lptune's own kernels multiply: at the rate that was
assumed before the machine code was read, and at that of a library.

A prediction says which part to work on. Its error is about 20 %.
"""

import math
from typing import Any, NamedTuple

import harness
from traffic import KINDS, config_of, layer_traffic

from lptune import models

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
LOGITS_PER_CHUNK = 2**27


class Part(NamedTuple):
    """Milliseconds of one part of a step, at the two rates of RATES: (cautious, hopeful)."""

    name: str
    ms: tuple[float, float]


def parts(kind: str, config: models.DecoderConfig, tokens: int, seq_len: int) -> list[Part]:
    """The parts of a step with one micro-batch of `tokens` tokens in rows of one document of `seq_len`."""
    entries = [each for each in layer_traffic(kind, config, tokens, seq_len) if not each.repeated]
    n, hidden, vocab = len(config.layers), config.hidden_size, config.vocab_size
    heads, head_dim = config.num_heads, config.head_dim
    qk = (heads + config.num_kv_heads) * head_dim
    weights = sum(math.prod(each.sizes[1:]) for each in entries if each.phase == "forward" and each.sizes)
    head = vocab * hidden
    parameters = n * weights + head * (1 if config.tied else 2)

    def bytes_of(what: str, phases: tuple[str, ...] = ("forward", "backward")) -> float:
        return float(sum(each.moved for each in entries if each.what == what and each.phase in phases))

    def layer_ms(bytes_of_layer: float) -> tuple[float, float]:
        return _same(1e3 * n * bytes_of_layer / BANDWIDTH)

    flops = {
        phase: sum(2.0 * math.prod(each.sizes) for each in entries if each.phase == phase and each.sizes)
        for phase in ("forward", "backward")
    }
    gemm = [1e3 * n * sum(flops[phase] / RATES[kind][phase][i] for phase in flops) for i in (0, 1)]
    attention = 4.0 * head_dim * heads * tokens * (seq_len + 1) / 2
    chunks = math.ceil(tokens * vocab / LOGITS_PER_CHUNK)
    # Fused by the compiler, of each token in bfloat16. Norms, with the residual sums before and after: 20
    # vectors of the hidden size read or written; rotations: 4 of q and k; gate and up: 9 of the MLP.
    elementwise = 2.0 * tokens * (20 * hidden + 4 * qk + 9 * config.intermediate_size)
    return [
        Part("linear layers", (gemm[0], gemm[1])),
        Part("quantizers", layer_ms(bytes_of("quantize"))),
        Part("transposes", layer_ms(bytes_of("copy"))),
        Part("attention", _same(1e3 * n * (attention / FLASH[0] + 2.5 * attention / FLASH[1]))),
        Part("elementwise", layer_ms(elementwise)),
        Part("head", _same(1e3 * 6 * tokens * head / BF16)),
        # Reads logits twice, writes their gradient: compiled, in bfloat16, of each chunk.
        Part("loss", _same(1e3 * 6 * tokens * vocab / BANDWIDTH)),
        # Of each chunk: reads the gradient in bfloat16, reads and writes the sum in float32.
        Part("sum of the head's gradient", _same(1e3 * 10 * head * chunks / BANDWIDTH)),
        Part("weights", layer_ms(_weight_bytes(kind, entries, weights, head))),
        Part("gradients", _same(1e3 * 6 * parameters / BANDWIDTH)),  # bfloat16 read, float32 written
        Part("norm and clipping", _same(1e3 * 12 * parameters / BANDWIDTH)),
        Part("AdamW", _same(1e3 * 28 * parameters / BANDWIDTH)),  # reads g, w, m, v; writes w, m, v
    ]


def _same(ms: float) -> tuple[float, float]:
    return ms, ms


def _weight_bytes(kind: str, entries: list[Any], weights: int, head: int) -> float:
    """Bytes for the compute weights of a layer, once in a step. The embedding is cast to bfloat16."""
    if kind == "none":
        return 6.0 * weights
    return float(sum(each.moved for each in entries if each.phase == "weights" and each.read != 4 * head))


def total(found: list[Part]) -> tuple[float, float]:
    """Milliseconds of the step."""
    return sum(each.ms[0] for each in found), sum(each.ms[1] for each in found)


def needed_rate(found: list[Part], bf16_ms: float, speedup: float, flops: float) -> float:
    """FLOP/s of the linear layers at which the step is `speedup` times as fast; inf: no rate suffices."""
    others = sum(each.ms[0] for each in found[1:])
    left = bf16_ms / speedup - others
    return flops / (1e-3 * left) if left > 0 else math.inf


def row(preset: str, tokens: int, seq_len: int = 4096) -> str:
    """A row of the table in docs/gpu.md."""
    config = config_of(preset)
    sums = {kind: total(parts(kind, config, tokens, seq_len)) for kind in KINDS}
    bf16 = sums["none"][0]
    cells = [f"{bf16:.0f}"]
    for kind in KINDS[1:]:
        ratios = "x to ".join(_ratios(bf16, sums[kind]).split(" to "))
        cells.append(f"{_range(sums[kind])} ({ratios}x)")
    name = preset.partition("/")[2].upper()
    return f"| {name}, {tokens // 1024}k tokens | {' | '.join(cells)} |"


def main() -> None:
    """Prints a step of each kind, and what a speed-up of 1.3 would need."""
    parser = harness.parser(__doc__)
    parser.add_argument("--preset", nargs="+", default=["llama3_2/1b", "llama3_2/3b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--seq-len", type=int, default=4096)
    args = parser.parse_args()
    with harness.Results(args.json, measured=False) as results:
        for preset in args.preset:
            config = config_of(preset)
            for tokens in args.tokens:
                found = {kind: parts(kind, config, tokens, args.seq_len) for kind in KINDS}
                print(f"\n{preset}, {tokens} tokens: predicted milliseconds")
                print(f"{'':28}" + "".join(f"{kind:>20}" for kind in KINDS))
                for rows in zip(*found.values(), strict=True):
                    print(f"{rows[0].name:28}" + "".join(f"{_range(row.ms):>20}" for row in rows))
                bf16 = total(found["none"])[0]
                sums = [total(each) for each in found.values()]
                print(f"{'step':28}" + "".join(f"{_range(each):>20}" for each in sums))
                print(f"{'times bf16':28}" + "".join(f"{_ratios(bf16, each):>20}" for each in sums))
                flops = 1e-3 * found["none"][0].ms[0] * BF16
                for kind in KINDS[1:]:
                    rate = needed_rate(found[kind], bf16, 1.3, flops) / 1e12
                    print(f"  1.3x of bf16 with {kind}: linear layers at {rate:,.0f} TFLOP/s")
                for kind, each in zip(KINDS, sums, strict=True):
                    parts_ms = {part.name: part.ms for part in found[kind]}
                    results.add(preset=preset, tokens=tokens, kind=kind, ms=each, parts=parts_ms)


def _range(ms: tuple[float, float]) -> str:
    low, high = (f"{each:.0f}" if each >= 9.95 else f"{each:.1f}" for each in ms)
    return low if low == high else f"{low} to {high}"


def _ratios(bf16: float, ms: tuple[float, float]) -> str:
    low, high = (f"{bf16 / each:.2f}" for each in ms)
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    main()
