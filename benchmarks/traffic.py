"""Operations of a decoder layer and the bytes that they move in a GPU's memory, counted without a GPU.

    python benchmarks/traffic.py [--preset llama3_2/3b] [--tokens 16384] [--kind KIND ...] [--json FILE]

The counting is lptune/plan/traffic.py, which says what is counted.
"""

from collections import Counter

import harness

from lptune import models
from lptune.plan.traffic import PASSES, Entry, layer_traffic

KINDS = ("none", "int8_rowcol", "int8_rotated", "float8_rowwise", "float8_tensorwise", "float8_blockwise")
LAUNCHES = dict.fromkeys(PASSES, 3)
"""Kernels of an op, if it has several: zeros for the amaxes, the amaxes, the values."""


def config_of(preset: str) -> models.Facts:
    """The config of a preset such as `llama3_2/3b`."""
    family, _, size = preset.partition("/")
    return models.config_from_dict(models.PRESETS[family][size], f"preset {preset}")


def totals(entries: list[Entry]) -> dict[tuple[str, str], tuple[int, int]]:
    """(phase, class) -> (launches, bytes moved), without repeated operations, as compiled code has them."""
    launches: Counter[tuple[str, str]] = Counter()
    moved: Counter[tuple[str, str]] = Counter()
    for each in entries:
        if not each.repeated:
            launches[each.phase, each.what] += LAUNCHES.get(each.name, 1)
            moved[each.phase, each.what] += each.moved
    return {key: (launches[key], moved[key]) for key in launches}


def main() -> None:
    """Prints launches and megabytes of each class of operations."""
    parser = harness.parser(__doc__)
    parser.add_argument("--preset", default="llama3_2/3b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--kind", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--entries", action="store_true", help="print each operation")
    args = parser.parse_args()
    with harness.Results(args.json) as results:
        for kind in args.kind:
            entries = layer_traffic(kind, config_of(args.preset), args.tokens, args.seq_len)
            print(f"\n{kind}: launches and MB of one layer, {args.tokens} tokens (repeated ones apart)")
            for (phase, what), (launches, moved) in totals(entries).items():
                print(f"  {phase:<10}{what:<12}{launches:5} {moved / 1e6:12.1f}")
                results.add(kind=kind, phase=phase, what=what, launches=launches, bytes=moved)
            for each in entries if args.entries else ():
                print(f"    {each}")


if __name__ == "__main__":
    main()
