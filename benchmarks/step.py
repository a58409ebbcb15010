"""The training step of lptune against transformers, torchao and torchtune: one command, one table.

    python benchmarks/step.py [--variant NAME...] [--rounds 10] [--json FILE] [--profile NAME]...
                              [--no-torchtune] [--layers 2] [--hidden 2048] ... [--threads 2]
                              [--compute-dtype float32]

All variants start from the same random weights and train on the same packed rows: same tokens, documents,
masks, positions. Each does forward, backward, clipping and AdamW with a constant learning rate, and
recomputes nothing. Tokens are all tokens of the rows. Variants take turns, one step each in a round, so that
other load affects them all; ratios are taken round by round. Names and what they stand for:
step_variants.py. A variant that cannot run here is named with the reason. torchtune is installed into a venv
of its own, and steps in a process of its own.

First loss and gradient norm must agree with those of `none`, or the comparison is not fair and the script
fails. An operation rounds to bf16 with a relative error of at most 2**-9, so n operations in a row give
hidden states and logits an error of about e = sqrt(n) * 2**-9; 8-bit operands add theirs. A logit's error is
as likely up as down, and the loss is a mean over N targets: four standard deviations of it are

    4 * sqrt(2) * e * (root mean square of the logits) / sqrt(N)

which is what losses may differ by. Norms may differ by their share e.

With `none` and `int8_rowcol` there is Amdahl's bound too: step_profile.py.
"""

import math
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import step_profile  # benchmarks/step_profile.py
import torch
from harness import Results, device_name, parser, strict_compilation
from step_variants import (
    NotHere,
    Packed,
    Setting,
    Step,
    TorchtuneProcess,
    all_names,
    fsdp_names,
    make,
    write_inputs,
)

from lptune import distributed, models
from lptune.config import ParallelConfig

SEED = 0
WARM_UP = 2
PEERS = ("torchao", "transformers", "torchtune")
Ratio = dict[str, float]


def main() -> int:
    args = parse()
    torch.set_num_threads(args.threads)
    config = config_of(args)
    # A compiled block, head or model of each variant is another graph of the same code.
    strict_compilation(32)
    if args.profile:
        # Names of compiled loops in the profile, at some microseconds a loop.
        torch._inductor.config.cpp.enable_kernel_profile = True
    rows = Packed.random(args.batch, args.seq_len, args.vocab, SEED)
    names = args.variant or [n for n in all_names() if not (args.no_torchtune and n.startswith("torchtune"))]
    parallel = ParallelConfig()
    shared = {
        name: getattr(args, name) for name in ("batch", "seq_len", "rounds", "threads", "compute_dtype")
    }
    with (
        tempfile.TemporaryDirectory() as temporary,
        distributed.session("auto", parallel) as world,
        Results(args.json, config=config, **shared, load=[], not_here={}) as results,
    ):
        write_inputs(folder := Path(temporary), config, rows, SEED)
        execution = distributed.Execution(parallel=parallel, compute_dtype=args.compute_dtype)
        setting = Setting(folder, rows, world, execution, args.torchtune_venv)
        num_documents = len(rows.bounds.offsets) - 1
        print(
            f"{args.layers} layers of {args.hidden}, MLP {args.mlp}, {args.heads} / {args.kv_heads} heads, "
            f"vocabulary {args.vocab}; {args.batch} rows of {args.seq_len} tokens, {num_documents} "
            f"documents; {args.compute_dtype}, torch {torch.__version__}, {device_name()}",
            flush=True,
        )
        results.content["load"].append(os.getloadavg())
        variants, first = prepare(names, setting, results)
        try:
            agrees = check(first, config, rows.num_targets)
            steps = measure(variants, args.rounds, results)
            results.content["load"].append(os.getloadavg())
            table(steps, first, args.batch * args.seq_len, results)
            loads = " and ".join(f"{load[0]:.1f}" for load in results.content["load"])
            print(f"load average at the start and the end: {loads}")
            explain(variants, steps, config, args, results)
        finally:
            for variant in variants.values():
                if isinstance(variant, TorchtuneProcess):
                    variant.close()
    return int(not agrees)


def parse() -> Any:
    arguments = parser(__doc__)
    choices = [*all_names(), *fsdp_names()]
    arguments.add_argument("--variant", nargs="+", choices=choices, metavar="NAME")
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument(
        "--profile", action="append", default=[], metavar="NAME", help="its time by purpose"
    )
    arguments.add_argument("--no-torchtune", action="store_true", help="install and run none")
    arguments.add_argument("--torchtune-venv", type=Path, default=Path(".venv-torchtune"))
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--compute-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    sizes = {"layers": 2, "hidden": 2048, "heads": 16, "kv-heads": 8, "mlp": 5632, "vocab": 2020}
    for name, size in {**sizes, "batch": 4, "seq-len": 512}.items():
        arguments.add_argument(f"--{name}", type=int, default=size)
    return arguments.parse_args()


def config_of(args: Any) -> dict[str, Any]:
    """config.json of a Llama of these sizes: untied, plain rotary positions."""
    preset = models.PRESETS["llama3_2"]["1b"]
    return preset | {
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "intermediate_size": args.mlp,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.hidden // args.heads,
        "max_position_embeddings": args.seq_len,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    }


def prepare(
    names: list[str], setting: Setting, results: Results
) -> tuple[dict[str, Callable[[], Step]], dict[str, Step]]:
    """(variants, their first steps): compiled and warm. Those that do not run here are told and left out, and
    so is one of another library that fails.
    """
    variants, first = dict[str, Callable[[], Step]](), dict[str, Step]()
    for name in names:
        try:
            variant = make(name, setting)
            first[name] = variant()
            for _ in range(WARM_UP - 1):
                variant()
        except NotHere as reason:
            results.content["not_here"][name] = str(reason)
            print(f"{name}: not here: {reason}", flush=True)
            continue
        except Exception as error:
            if not name.startswith(PEERS):
                raise
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            results.content["not_here"][name] = f"failed: {message[:500]}"
            print(f"{name}: failed: {message[:160]}", flush=True)
            continue
        variants[name] = variant
    return variants, first


def tolerances(name: str, config: dict[str, Any], num_targets: int) -> tuple[float, float]:
    """(of the loss, of the gradient norm's ratio to 1) between this variant and `none`; see the top."""
    num_layers = config["num_hidden_layers"]
    error = math.sqrt(12 * num_layers + 4) * 2**-9  # a block's operations that round, on the longest path
    if "8" in name:
        # Four GEMMs on the path through a block, two operands each: rounded to 1/127 of the largest of a row
        # or tensor, taken as 16 times the root mean square; a rounding's deviation is a step / sqrt(12).
        error += math.sqrt(8 * num_layers) * 16 / 127 / math.sqrt(12)
    logits = config["initializer_range"] * math.sqrt(config["hidden_size"])  # of normed states
    # torchtune's norm is a bf16 number: of norms of tensors that are, too.
    of_norm = error + (2**-8 if name.startswith("torchtune") else 0.0)
    return 4 * math.sqrt(2) * error * logits / math.sqrt(num_targets), of_norm


def check(first: dict[str, Step], config: dict[str, Any], num_targets: int) -> bool:
    """Prints the first loss and norm of each variant; whether they agree with those of the first one."""
    reference = first.get("none") or next(iter(first.values()))
    agrees = True
    print(f"{'first step':<28}{'loss':>10}{'differs by':>12}{'allowed':>10}", end="")
    print(f"{'gradient norm':>15}{'ratio':>9}{'allowed':>10}")
    for name, step in first.items():
        loss, norm = tolerances(name, config, num_targets)
        off, ratio = step.loss - reference.loss, step.grad_norm / reference.grad_norm
        fair = abs(off) <= loss and abs(ratio - 1) <= norm
        agrees &= fair
        print(
            f"{name:<28}{step.loss:>10.5f}{off:>12.5f}{loss:>10.5f}{step.grad_norm:>15.5f}{ratio:>9.4f}"
            f"{norm:>10.4f}{'' if fair else '  NOT THE SAME COMPUTATION'}",
            flush=True,
        )
    return agrees


def measure(variants: dict[str, Callable[[], Step]], rounds: int, results: Results) -> dict[str, list[float]]:
    """Seconds of one step of each variant in each round. Each round begins with another variant.

    The file has the seconds after each round, so that an interruption loses one round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    for _ in range(rounds):
        for name in order:
            seconds[name].append(variants[name]().seconds)
        order = order[1:] + order[:1]
        results.update(seconds=seconds)
    return seconds


def ratio(to: list[float] | None, of: list[float]) -> Ratio | None:
    """How many times as fast `of` is as `to`, by rounds: median, smallest, largest."""
    if to is None:
        return None
    each = [a / b for a, b in zip(to, of, strict=True)]
    return {"median": statistics.median(each), "min": min(each), "max": max(each)}


def table(seconds: dict[str, list[float]], first: dict[str, Step], num_tokens: int, results: Results) -> None:
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    peers = [name for name in seconds if name.startswith("transformers")]
    best = min(peers, key=lambda name: medians[name]) if peers else None
    heading = f"{'variant':<28}{'s':>8}{'fastest':>9}{'tokens/s':>10}"
    print(f"\n{heading}   {f'of {best}' if best else '':<27}   of none")
    for name, times in seconds.items():
        to_best, to_none = (ratio(seconds.get(to or ""), times) for to in (best, "none"))
        row = results.add(
            variant=name,
            median_s=medians[name],
            tokens_per_s=num_tokens / medians[name],
            fastest_s=min(times),
            times_s=times,
            best_transformers=best,
            to_transformers=to_best,
            to_none=to_none,
            first_loss=first[name].loss,
            first_grad_norm=first[name].grad_norm,
        )
        cells = [
            f"{each['median']:.2f}x ({each['min']:.2f} to {each['max']:.2f})" if each else "-"
            for each in (to_best, to_none)
        ]
        numbers = f"{row['median_s']:>8.3f}{row['fastest_s']:>9.3f}{row['tokens_per_s']:>10,.0f}"
        print(f"{name:<28}{numbers}   {cells[0]:<27}   {cells[1]}")


def explain(
    variants: dict[str, Callable[[], Step]],
    seconds: dict[str, list[float]],
    config: dict[str, Any],
    args: Any,
    results: Results,
) -> None:
    """Prints the profiles that were asked for, and Amdahl's bound if none and int8_rowcol ran."""
    bounded = {"none", "int8_rowcol"} <= variants.keys()
    wanted = [*dict.fromkeys([*args.profile, *(["none"] if bounded else [])])]
    profiles = dict[str, list[step_profile.Cost]]()
    for name in wanted:
        if name not in variants or isinstance(variants[name], TorchtuneProcess):
            print(f"no profile of {name}: it does not run in this process")
            continue
        profiles[name] = step_profile.profile(variants[name], config["vocab_size"])
        if name in args.profile:
            print("", *step_profile.lines(name, profiles[name]), sep="\n", flush=True)
    results.content["profiles"] = {
        name: {"by_purpose_ms": step_profile.by_purpose(costs), "costs": [c._asdict() for c in costs[:60]]}
        for name, costs in profiles.items()
    }
    if bounded:
        amdahl(profiles["none"], seconds, config, args, results)


def amdahl(
    costs: list[step_profile.Cost],
    seconds: dict[str, list[float]],
    config: dict[str, Any],
    args: Any,
    results: Results,
) -> None:
    """Prints which share of Amdahl's bound int8_rowcol reaches."""
    hidden, mlp, kv = args.hidden, args.mlp, args.kv_heads * config["head_dim"]
    shapes = Counter([(hidden, hidden)] * 2 + [(kv, hidden)] * 2 + [(mlp, hidden)] * 2 + [(hidden, mlp)])
    shapes = Counter({shape: args.layers * count for shape, count in shapes.items()})
    found = step_profile.speeds(shapes, args.batch * args.seq_len, dtype=getattr(torch, args.compute_dtype))
    gemms_ms = step_profile.by_purpose(costs)[step_profile.GEMMS]
    share = gemms_ms / sum(cost.ms for cost in costs)
    reached = ratio(seconds["none"], seconds["int8_rowcol"])
    assert reached is not None
    print(
        f"\nAmdahl: the linear layers' GEMMs take {gemms_ms:.1f} ms, {share:.1%} of a step of none (profile)"
    )
    content = {"gemms_ms": gemms_ms, "share": share, **found._asdict()}
    ways = {"INT8 GEMMs alone": found.gemm_ratios, "whole INT8 linear layers": found.linear_ratios}
    print(f"  these GEMMs in {args.compute_dtype}, alone: {found.high_ms:.1f} ms")
    for (way, ratios), ms in zip(ways.items(), (found.scaled_mm_ms, found.linear_ms), strict=True):
        r = statistics.median(ratios)
        bound = step_profile.bound(share, r)
        content[way] = {"ratio": r, "bound": bound, "reached": reached["median"] / bound}
        print(
            f"  {way:<28}{ms:>8.1f} ms  r = {r:.2f} ({min(ratios):.2f} to {max(ratios):.2f})  "
            f"bound {bound:.2f}x  int8_rowcol has {reached['median']:.2f}x: "
            f"{reached['median'] / bound:.0%} of it"
        )
    results.content["amdahl"] = content


if __name__ == "__main__":
    sys.exit(main())
