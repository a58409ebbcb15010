"""Times compiled training steps of the recipe with a model of real shape: tokens/s, MFU, memory of each kind.

    python benchmarks/steps.py [--preset llama3_2/1b | --config FILE] [--label LABEL]... [--minutes 9]
                               [--json FILE] [--work FOLDER] [--override KEY=VALUE]... [--profile LABEL]...

A label is a kind, `torchao KIND`, or a kind with other keys (`int8_rowcol + data.packing=false`). Each one is
one run of recipes/full_finetune.py in its own process, forked from a process that has imported torch. torchao
uses the same recipe, with torchao's conversion in place of ours. Weights are random and the text is
synthetic, which does not change the time of a step. No weight is read or written: the checkpoint's file is a
header and a hole, and runs neither save nor export. --config names the config.json of any model, in place of
a preset; --layers gives it so many.

Figures are medians of the steps after the fourth. --profile adds the share of each kernel in later steps.
`planned` is the peak that `lptune plan` predicts (for eager blocks; compiled blocks should need less), from
the table of planned.py. Labels that did not run in the given time are listed; none is started that has less
time left than the fastest of the others took.
"""

import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from harness import Results, device_name, parser, strict_compilation
from linear import convert_to_torchao  # benchmarks/linear.py
from planned import Setting, peak_gib  # benchmarks/planned.py

from lptune import checkpoint, distributed, linear, models, training
from lptune.checkpoint.adapter import region
from lptune.cli import catalog, recipe
from lptune.config import FinetuneConfig, load_config

# The most important ones first, because a run may be interrupted. torchao's INT8 last: it measures its 27
# configurations one after the other for each shape of a GEMM, which takes two minutes.
LABELS = [
    "none",
    "int8_rowcol",
    "int8_rotated",
    "float8_rowwise",
    "float8_tensorwise",
    "int8_tensorwise",
    "float8_rowwise_with_gw_hp",
    "float8_blockwise",
    "float8_delayed",
    "mxfp8",
    "int8_weight_only",
    "torchao float8_rowwise",
    "torchao float8_tensorwise",
    "torchao float8_rowwise_with_gw_hp",
    "torchao int8_rowcol",
]
WARM_UP, TIMED, PROFILED = 4, 8, 1
KEYS = ("tokens_per_s", "step_time_s", "mfu", "bf16_mfu", "peak_memory_gib", "low_precision_flops_fraction")
KERNELS = {
    "8-bit GEMM": r"(scaled_mm|grouped_mm|grouped_outer|hopper|block_mm)_kernel|_scaled_mm|_int_mm|scaled_mm",
    "quantizer": r"^((rows|amax|store|grouped_columns)_kernel|quantize_)|lptune::quantize|lptune::cast",
    "attention": r"flash|fmha|attention|cudnn.*sdpa",
    "optimizer": r"adam",
    "bf16 GEMM": r"nvjet|gemm|cutlass|xmma|aten::(mm|addmm|bmm)",
    "compiled": r"^triton_|graph_\d+_kernel",
    "copy": r"copy|memcpy|memset|cat\b|chunk|split|fill",
}
"""What kernels and operators are for, by their names; the first that matches."""


def prepare(
    work: Path, preset: str, *, layers: int | None = None, config: Path | None = None
) -> tuple[Path, Path]:
    """Makes (checkpoint, text) under `work`, once. The weights of the checkpoint are a hole in a file.

    layers: makes a model with so many layers and the tokenizer's own small vocabulary; None: the preset's.
    config: a config.json that takes the preset's place; it keeps its own vocabulary.
    """
    family, _, size = preset.partition("/")
    tiny, text = work / "tokenizer", work / "text.jsonl"
    folder = work / (preset.replace("/", "-") if config is None else config.parent.name)
    folder.mkdir(parents=True, exist_ok=True)
    if not tiny.exists():
        command = ["new-checkpoint", f"{family}/tiny", str(tiny)]
        subprocess.run([sys.executable, "-m", "lptune.cli.main", *command], check=True, capture_output=True)
    for file in tiny.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    of_tiny = _json(tiny / "config.json")
    if config is not None:
        content = _json(config)
    else:
        content = dict(models.PRESETS[family][size])
        content |= {key: value for key, value in of_tiny.items() if key.endswith("_token_id")}
        content["vocab_size"] = max(content["vocab_size"], of_tiny["vocab_size"])
    if layers is not None:
        content["num_hidden_layers"] = layers
        if config is None:
            content["vocab_size"] = of_tiny["vocab_size"]
        if "layer_types" in content:
            content["layer_types"] = content["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    _write_hollow(models.build_on_meta(models.read_config(folder)), folder / "model.safetensors")
    if not text.exists():
        rng = random.Random(0)
        letters = "abcdefghijklmnopqrstuvwxyz "
        rows = ({"text": "".join(rng.choices(letters, k=20_000))} for _ in range(64))
        text.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder, text


def _write_hollow(model: models.Backbone, path: Path) -> None:
    """Writes a safetensors file of the model's tensors in bfloat16 that takes only a page of disk."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        for part in model.stored_as(name, tuple(parameter.shape)):
            ends = tuple(each.stop for each in region(part))
            shapes[part.stored] = tuple(map(max, ends, shapes.get(part.stored, ends)))
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def common_overrides(folder: Path, text: Path) -> list[str]:
    """What every run overrides: 4 rows of 4096 tokens, nothing saved. Later values have priority."""
    overrides = [f"model.path={folder}", f"data.source={text}"]
    overrides += ["global_batch_size=4", "micro_batch_size=4", "data.seq_len=4096", "eval_every_steps=0"]
    overrides += ["checkpoint.at_end=false", "export.enabled=false", "resume=none"]
    # On one rank a copy of the weights stays in memory, for all labels.
    return [*overrides, "parallel.reshard_after_forward=false"]


def overrides_of(label: str, *, emulated: bool | None = None) -> list[str]:
    """The overrides of a label. emulated: None: if this device cannot run the kind."""
    kind, *overrides = label.split(" + ")
    if not kind.startswith("torchao "):
        if emulated is None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            emulated = kind not in linear.native_kinds(device)
        overrides += [f"precision.kind={kind}", f"precision.emulate={str(emulated).lower()}"]
    return overrides


def child(label: str, overrides: list[str], folder: Path, profiled_after: int | None) -> None:
    """Runs the recipe, in a child process; its output goes to FOLDER.txt.

    profiled_after: the step after which steps are profiled, to FOLDER.json; None: no step is.
    """
    log = os.open(folder.with_suffix(".txt"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    more = overrides_of(label)
    # One thread for each core that this process may use; a forked process does not compute this itself.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0)))
    strict_compilation()
    checkpoint.load_hf = _fill  # type: ignore[assignment]
    if label.startswith("torchao "):
        linear.convert = _torchao_convert(label.removeprefix("torchao "))  # type: ignore[assignment]
    try:
        cfg = load_config(FinetuneConfig, catalog.find_config("llama3_2/1b"), [*overrides, *more])
        main_of_recipe = recipe.load_main(catalog.find_recipe("full_finetune"))
        if profiled_after is not None:
            _profile(lambda: main_of_recipe(cfg), folder.with_suffix(".json"), profiled_after)
        else:
            main_of_recipe(cfg)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _fill(model: torch.nn.Module, source: object, world: object) -> None:
    """Fills the weights with random values on the device, instead of reading them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = distributed.on_this_rank(parameter)
            # An INT8 weight is filled by its own method; other weights are written in place.
            rows = local if linear.int8_rows(local) is not None else linear.plain_rows(local)
            if "norm" in name:
                rows.fill_(1.0)
            else:
                rows.normal_(0.0, 0.02)


def _torchao_convert(kind: str) -> Any:
    def convert(model: torch.nn.Module, *args: object, **kwargs: object) -> linear.Plan:
        linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        layers = tuple(linear.LayerPlan(n, m.in_features, m.out_features, None) for n, m in linears.items())
        done = convert_to_torchao(kind, model.get_submodule("model"))
        assert done is not None, f"torchao is not installed here, or has no {kind}"
        return linear.Plan("none", layers)

    return convert


def _profile(run: Any, path: Path, after: int) -> None:
    """Runs the recipe; writes the time of each kernel in the steps after step `after`.

    The profiler already records in step `after`, the last one that is timed: the median hides that one.
    """
    on_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=after - 1, warmup=1, active=PROFILED, repeat=1)
    update = training.Update.__call__
    with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
        updates = itertools.count(1)

        def call(self: Any, *args: Any) -> Any:
            result = update(self, *args)
            if on_gpu and next(updates) >= after - 1:  # not in the steps that are timed, but for the last
                torch.cuda.synchronize()  # so that a profiled step has its own update
            profiler.step()
            return result

        training.Update.__call__ = call  # type: ignore[method-assign]
        run()
    kernels = []
    averages = profiler.key_averages()
    for each in averages:
        # On a GPU, count kernels only: times of operators and ranges contain those of their kernels.
        if each.is_user_annotation or (on_gpu and each.device_type != torch.autograd.DeviceType.CUDA):
            continue
        ms = (each.self_device_time_total if on_gpu else each.self_cpu_time_total) / 1e3
        if ms > 0:
            kernels.append((each.key, each.count, ms))
    kernels.sort(key=lambda each: -each[2])
    groups: Counter[str] = Counter()
    for name, _, ms in kernels:
        groups[group_of(name)] += ms  # type: ignore[assignment]
    content = {
        "busy_ms": sum(ms for *_, ms in kernels),
        "idle": _idle(profiler.events()) if on_gpu else {},
        "host": _host(averages) if on_gpu else [],
        "groups_ms": dict(groups.most_common()),
        "kernels": kernels[:40],
    }
    path.write_text(json.dumps(content), encoding="utf-8")


def _idle(events: Any) -> dict[str, Any]:
    """When no kernel ran between the first and the last of the profiled steps: ms by the length of the
    pauses, and by what came next.
    """
    on_gpu = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    on_gpu = [e for e in on_gpu if not e.is_user_annotation]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in on_gpu)
    by_length, after, busy_until = Counter[str](), Counter[str](), spans[0][0] if spans else 0
    for start, end, name in spans:
        pause_us = start - busy_until
        if pause_us > 0:
            length = "up to 5 us" if pause_us < 5 else "up to 50 us" if pause_us < 50 else "more"
            by_length[length] += pause_us / 1e3  # type: ignore[assignment]
            after[name[:60]] += pause_us / 1e3  # type: ignore[assignment]
        busy_until = max(busy_until, end)
    return {"ms": dict(by_length), "before": after.most_common(12)}


def _host(averages: Any) -> list[tuple[str, int, float]]:
    """(operator, calls, ms of its own) of what took the host longest, under the profiler."""
    found = [(each.key, each.count, each.self_cpu_time_total / 1e3) for each in averages]
    return sorted(found, key=lambda each: -each[2])[:20]


def group_of(name: str) -> str:
    """The purpose of a kernel, from its name."""
    return next((group for group, pattern in KERNELS.items() if re.search(pattern, name, re.I)), "other")


def one(
    label: str, common: list[str], work: Path, timeout_s: float, profiled: bool, timed: int = TIMED
) -> dict[str, Any]:
    """The figures of one run, or the reason why there are none. timed: the number of steps that count."""
    model = next(each for each in common if each.startswith("model.path="))
    folder = work / re.sub(r"\W+", "-", f"run-{Path(model).name}-{label}")
    shutil.rmtree(folder, ignore_errors=True)  # its figures must not be confused with those of this run
    for suffix in (".txt", ".json"):
        folder.with_suffix(suffix).unlink(missing_ok=True)
    last = WARM_UP + timed
    # A later value of the same key has priority.
    overrides = [*common, f"output_dir={folder}", f"num_steps={last + PROFILED * profiled}"]
    process = multiprocessing.get_context("forkserver").Process(
        target=child, args=(label, overrides, folder, last if profiled else None)
    )
    started = time.perf_counter()
    process.start()
    process.join(timeout_s)
    finished = process.exitcode is not None
    if not finished:
        process.kill()
        process.join()
    log, metrics = folder.with_suffix(".txt"), folder / "metrics.jsonl"
    row: dict[str, Any] = {"label": label, "wall_s": time.perf_counter() - started}
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    steps = [step for step in map(json.loads, lines) if WARM_UP < step["step"] <= last]
    for key in KEYS:
        values = [step[key] for step in steps if step.get(key) is not None]
        row[key] = statistics.median(values) if values else None
    row["num_steps"] = len(steps)
    if folder.with_suffix(".json").exists():
        row["profile"] = _json(folder.with_suffix(".json"))
    said = log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""
    attention = re.search(r"attention by (\w+)", said)
    row["attention"] = attention and attention[1]
    if not finished:
        row["failed"] = f"not finished after {timeout_s:.0f} s"
    elif process.exitcode:
        row["failed"] = f"exit {process.exitcode}: {said[-600:]}"
    return row


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def line(row: dict[str, Any], first: dict[str, Any]) -> str:
    """A row of the table, with its speed relative to the first row."""

    def cell(key: str, form: str, width: int) -> str:
        return f"{format(row[key], form) if row.get(key) is not None else '-':>{width}}"

    ratio = "-"
    if row.get("tokens_per_s") and first.get("tokens_per_s"):
        ratio = f"{row['tokens_per_s'] / first['tokens_per_s']:.2f}x"
    cells = cell("tokens_per_s", ",.0f", 10) + f"{ratio:>9}" + cell("mfu", ".1%", 7)
    cells += cell("bf16_mfu", ".1%", 10) + cell("peak_memory_gib", ".1f", 7) + cell("planned_gib", ".1f", 9)
    cells += cell("low_precision_flops_fraction", ".1%", 13) + cell("wall_s", ".0f", 8)
    failed = f"  failed: {row['failed'][-160:]!r}" if "failed" in row else ""
    return f"{row['label']:<38}{cells}{failed}"


def profile_lines(row: dict[str, Any]) -> list[str]:
    """The shares of a profile: by purpose, then the longest kernels."""
    profile, step_ms = row["profile"], 1e3 * (row["step_time_s"] or 0.0)
    busy = profile["busy_ms"] / PROFILED
    idle = f", the step takes {step_ms:.1f} ms without the profiler" if step_ms else ""
    lines = [f"    profile of {row['label']}: {busy:.1f} ms of kernels in a step{idle}"]
    if profile.get("idle"):
        pauses = ", ".join(
            f"{ms:.1f} ms in pauses of {length}" for length, ms in profile["idle"]["ms"].items()
        )
        lines.append(f"      idle: {pauses}")
        lines += [f"        {ms:9.2f} ms before {name}" for name, ms in profile["idle"]["before"][:6]]
        lines += [
            f"        host {ms:9.2f} ms {count:>5} x {name[:60]}" for name, count, ms in profile["host"][:12]
        ]
    for group, ms in profile["groups_ms"].items():
        lines.append(f"      {group:<14}{ms / PROFILED:9.2f} ms  {ms / profile['busy_ms']:6.1%}")
    for name, count, ms in profile["kernels"][:12]:
        share = ms / profile["busy_ms"]
        lines.append(f"        {name[:70]:<72}{count:>5} x{ms / PROFILED:9.2f} ms  {share:6.1%}")
    return lines


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--preset", default="llama3_2/1b")
    arguments.add_argument("--config", type=Path, help="a config.json, in place of a preset")
    arguments.add_argument("--layers", type=int, help="with --config: so many layers")
    arguments.add_argument("--label", action="append", help="those of LABELS if none is given")
    arguments.add_argument("--minutes", type=float, default=9.0, help="start no further label after them")
    arguments.add_argument("--work", type=Path, default=Path("runs/steps"))
    arguments.add_argument("--override", action="append", default=[], metavar="KEY=VALUE")
    arguments.add_argument("--profile", action="append", default=[], metavar="LABEL")
    arguments.add_argument("--timed", type=int, default=TIMED, help="steps that count, after the fourth")
    args = arguments.parse_args()
    # For the children, which inherit it. A run that nearly fills the card needs it.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    deadline = time.monotonic() + 60 * args.minutes
    folder, text = prepare(args.work.absolute(), args.preset, layers=args.layers, config=args.config)
    common = [*common_overrides(folder, text), *args.override]
    setting = Setting(args.preset, tuple(args.override))
    has_torchao = (
        subprocess.run([sys.executable, "-c", "import torchao"], capture_output=True).returncode == 0
    )
    labels = args.label or [each for each in LABELS if has_torchao or not each.startswith("torchao ")]
    # Children are forked from this process, which has imported all modules and not used the device.
    # Not torch._inductor.compile_fx: in torch 2.11 it asks for a GPU when imported, after which no fork can
    # use one.
    preload = ["steps", "torch._dynamo"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    with Results(args.json, preset=args.preset, overrides=common, not_run=[]) as results:
        print(f"{args.config or args.preset}, torch {torch.__version__}, {device_name()}")
        print(" ".join(common[2:]))
        print(
            f"{'':<38}{'tokens/s':>10}{'of 1st':>9}{'MFU':>7}{'bf16 MFU':>10}{'GiB':>7}{'planned':>9}"
            f"{'8-bit FLOPs':>13}{'wall s':>8}"
        )
        for label in labels:
            left_s = deadline - time.monotonic()
            if left_s < min((row["wall_s"] for row in results.rows if "failed" not in row), default=5):
                results.content["not_run"].append(label)
                continue
            on_gpu = torch.cuda.is_available()  # the plans are those of a GPU
            planned = on_gpu and args.config is None and not label.startswith("torchao ")
            peak = peak_gib(setting, label) if planned else None
            profiled = label in args.profile
            row = one(label, common, args.work.absolute(), left_s, profiled, args.timed)
            row = results.add(**row, planned_gib=peak)
            print(line(row, results.rows[0]), flush=True)
            if "profile" in row:
                print("\n".join(profile_lines(row)), flush=True)
        if results.content["not_run"]:
            print(f"not run, the time was over: {', '.join(results.content['not_run'])}")
    return int(any("failed" in row for row in results.rows))


if __name__ == "__main__":
    sys.exit(main())
