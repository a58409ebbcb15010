"""Operations of a decoder layer and the bytes that they move in a GPU's memory, counted without a GPU.

    python benchmarks/traffic.py [--preset llama3_2/3b] [--tokens 16384] [--kind KIND ...] [--json FILE]

The counting is lptune/plan/traffic.py, which says what is counted.
"""

import harness

from lptune.plan.traffic import KINDS, config_of, layer_traffic, totals


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
