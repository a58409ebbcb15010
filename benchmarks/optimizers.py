"""Times the update of each optimizer.kind, and counts the bytes that a parameter takes.

    python benchmarks/optimizers.py [--shape ROWS COLUMNS] [--threads N] [--peers] [--json FILE]

One matrix with a float32 gradient. A time is that of the fastest of some rounds, in which the optimizers
take turns, in nanoseconds a parameter; --peers adds torchao's 8-bit AdamW, which torch.compile compiles.
Bytes are those of weight, gradient and state, and the most that the update takes for a while on top.
"""

from typing import Any

import torch
from harness import Results, device_name, device_type, fastest_ms, parser
from torch import nn

from lptune import training
from lptune.config import OPTIMIZER_KINDS, OptimizerConfig
from lptune.plan.memory import MemoryLog, storage_bytes


def build(name: str, layer: nn.Module) -> torch.optim.Optimizer:
    """name: an optimizer.kind, or a peer."""
    if name == "torchao AdamW8bit":
        from torchao.optim import AdamW8bit

        return AdamW8bit(layer.parameters(), lr=1e-5)
    return training.build_optimizer(layer, OptimizerConfig(kind=name, lr=1e-5))


def temporary_bytes(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> int:
    """The most that an update takes on top of what lasts."""
    with MemoryLog() as log:
        log.label("lasts", [layer.weight, layer.weight.grad, list(optimizer.state[layer.weight].values())])
        log.phase("update")
        optimizer.step()
    if (peak := log.peaks().get("update")) is None:
        return 0
    return peak.total() - peak["lasts"]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", type=int, nargs=2, default=(4096, 4096))
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--peers", action="store_true")
    args = arguments.parse_args()
    torch.set_num_threads(args.threads)
    rows, columns = args.shape
    names = [*OPTIMIZER_KINDS, *(["torchao AdamW8bit"] if args.peers else [])]
    built: dict[str, tuple[nn.Linear, torch.optim.Optimizer]] = {}
    for name in names:
        layer = nn.Linear(columns, rows, bias=False, device=device_type())
        layer.weight.grad = torch.randn_like(layer.weight) * 1e-3
        built[name] = (layer, build(name, layer))
        built[name][1].step()  # makes the state, and compiles
    ms = fastest_ms({name: optimizer.step for name, (_, optimizer) in built.items()}, args.rounds)
    print(f"{rows} x {columns}, {device_name()}\n")
    print("| optimizer | ns a parameter | of adamw | bytes a parameter, lasting | on top, MiB |")
    print("|---|---|---|---|---|")
    count = rows * columns
    with Results(args.json, shape=[rows, columns]) as results:
        for name, (layer, optimizer) in built.items():
            lasting: Any = [layer.weight, layer.weight.grad, list(optimizer.state[layer.weight].values())]
            row = {
                "optimizer": name,
                "ns": 1e6 * ms[name] / count,
                "ratio": ms[name] / ms["adamw"],
                "bytes": storage_bytes(lasting) / count,
                "temporary_mib": None
                if name == "torchao AdamW8bit"
                else temporary_bytes(layer, optimizer) / 2**20,
            }
            results.add(**row)
            top = "" if row["temporary_mib"] is None else f"{row['temporary_mib']:.1f}"
            print(
                f"| {name} | {row['ns']:.2f} | {row['ratio']:.2f} | {row['bytes']:.3f} | {top} |", flush=True
            )


if __name__ == "__main__":
    main()
