"""axolotl's YAML: flat keys, many of them those of transformers' Trainer.

Keys and defaults are those of axolotl at 067b021c8 (July 2026). A key that is there but empty counts as not
set, as in axolotl.
"""

from typing import Any

from lptune.tools.migrate import axolotl_data
from lptune.tools.migrate.axolotl_keys import RULES
from lptune.tools.migrate.common import WARMUP, set_batches, set_defaults
from lptune.tools.migrate.draft import (
    BY_DESIGN,
    NOT_NEEDED,
    NOT_OFFERED,
    OFF,
    Draft,
    refuse,
    walk,
)

_SCHEDULES = {
    "cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
}  # fmt: skip
_SHARED = (
    "tensor_parallel_size",
    "context_parallel_size",
    "sequence_parallel_degree",
    "pipeline_parallel_size",
)


def fill(draft: Draft) -> None:
    """Fills `draft` from an axolotl config. Raises UserError (one line) for adapters, QAT and preferences."""
    _check_kind(draft)
    walk(draft, RULES)
    if draft.get("pretraining_dataset") is not None:
        draft.recipe = "continued_pretrain"
    axolotl_data.fill(draft)
    _set_batches(draft)
    _set_schedule(draft)
    _set_per_epoch(draft)
    _set_offload(draft)
    if draft.get("fp8") is True:
        draft.set("precision.kind", "float8_tensorwise", "fp8")
        key = "fp8_enable_fsdp_float8_all_gather"
        draft.set("precision.all_gather", "low" if draft.get(key) else "high",
                  *draft.given(key))  # fmt: skip
    checkpointing = draft.get("gradient_checkpointing") or _fsdp(draft, "activation_checkpointing")[1]
    keys = [
        key
        for key in ("gradient_checkpointing", _fsdp(draft, "activation_checkpointing")[0])
        if draft.get(key) is not None
    ]
    draft.set("activation_checkpointing", "full" if checkpointing else "none", *keys)
    draft.set("compile", "block" if draft.get("torch_compile") else "none",
              *draft.given("torch_compile"))  # fmt: skip
    set_defaults(
        draft,
        {
            "data.seq_len": 512,
            "data.packing": False,
            "optimizer.beta2": 0.999,
            "seed": 42,
        },
    )


def _check_kind(draft: Draft) -> None:
    adapter = draft.get("adapter")
    if adapter:
        raise refuse(draft, f"adapter: {adapter} trains adapters", "; there is no LoRA here")
    if draft.get("load_in_4bit") or draft.get("load_in_8bit") or draft.get("gptq"):
        raise refuse(draft, "loads weights in 4 or 8 bits, which only adapters train", "")
    if rl := draft.get("rl"):
        recipe = {
            "dpo": "full_dpo",
            "ipo": "full_dpo",
            "orpo": "full_dpo",
            "simpo": "full_dpo",
            "kto": "full_kto",
        }.get(str(rl))
        where = f"; see the recipe {recipe} (docs/preferences.md)" if recipe else ""
        raise refuse(draft, f"rl: {rl} is no fine-tuning on answers", where)
    for key in ("reward_model", "process_reward_model", "num_labels"):
        if draft.get(key):
            raise refuse(draft, f"{key}: {draft.get(key)} trains a classifier", "")
    for key in ("qat", "diffusion", "processor_type"):
        if draft.get(key) is not None:
            what = {"qat": "is quantization-aware training", "diffusion": "trains a diffusion model"}
            raise refuse(draft, f"{key}: {what.get(key, 'reads images or sound')}", "")


def _set_batches(draft: Draft) -> None:
    shared = 1
    for key in _SHARED:
        shared *= draft.integer(key, 1)
        if key != "tensor_parallel_size" and draft.get(key) is not None:
            on = draft.integer(key, 1) > 1
            draft.drop(
                key, NOT_OFFERED if on else OFF, "there is no context or pipeline parallelism" if on else ""
            )
    steps = draft.integer("gradient_accumulation_steps", 1)
    keys = draft.given("micro_batch_size", "gradient_accumulation_steps")
    size = draft.integer("micro_batch_size", 1)
    set_batches(draft, (size, draft.given("micro_batch_size")), (None, keys), shared, steps)


def _num_steps(draft: Draft) -> int | None:
    steps: int | None = draft.value_of("num_steps")
    return steps or draft.num_steps


def _set_schedule(draft: Draft) -> None:
    name = str(draft.get("lr_scheduler", "cosine"))
    keys = ["lr_scheduler"] if draft.get("lr_scheduler") is not None else []
    if name in _SCHEDULES:
        draft.set("schedule.kind", _SCHEDULES[name], *keys)
    else:
        draft.drop("lr_scheduler", NOT_OFFERED, f"{name}: cosine, linear, constant and wsd are offered")
        draft.ask("schedule.kind", f"lr_scheduler: {name} is not offered")
    if name == "constant":  # of transformers, which takes a warmup and ignores it
        for key in draft.given("warmup_steps", "warmup_ratio"):
            draft.drop(key, OFF, "lr_scheduler: constant has no warmup there")
        return
    steps, ratio = _num_steps(draft), draft.get("warmup_ratio")
    count = draft.get("warmup_steps")
    if isinstance(count, float) and 0 < count < 1:
        ratio, key = count, "warmup_steps"
    elif count is not None:
        draft.set("schedule.warmup_steps", draft.integer("warmup_steps", 0, 0), "warmup_steps", note=WARMUP)
        ratio = None
        if draft.get("warmup_ratio") is not None:
            draft.drop("warmup_ratio", OFF, "warmup_steps holds")
    else:
        key = "warmup_ratio"
    if count is None and ratio is None:
        _set_warmup(draft, 0.03, steps, (), "at most 100 steps there", limit=100)
    elif ratio is not None:
        _set_warmup(draft, draft.number(key, 0.0), steps, (key,), "")
    if name == "cosine":
        _set_minimum(draft)


def _set_warmup(
    draft: Draft, ratio: float, steps: int | None, keys: tuple[str, ...], extra: str, limit: int | None = None
) -> None:
    note = f"{ratio:g} of the steps{f', {extra}' if extra else ''}; {WARMUP}"
    if steps is None:
        draft.set("schedule.warmup_steps", 0, *keys, note=note)
        draft.ask(
            "schedule.warmup_steps",
            f"{ratio:g} of the run's steps{f', {extra}' if extra else ''}; --num-steps N computes it",
        )
    else:
        count = int(ratio * steps) if limit else -int(-ratio * steps // 1)
        draft.set("schedule.warmup_steps", min(count, limit or count), *keys, note=note)


def _set_minimum(draft: Draft) -> None:
    key, other = "cosine_min_lr_ratio", "cosine_constant_lr_ratio"
    if draft.get(key) is not None:
        draft.set("schedule.min_lr_ratio", draft.number(key, 0.0), key)
    if draft.get(other) is not None:
        is_off = draft.number(other, 0.0) in (0.0, 1.0)
        draft.drop(
            other, OFF if is_off else NOT_OFFERED, "" if is_off else "the rate falls until the last step"
        )


def _set_per_epoch(draft: Draft) -> None:
    """evals_per_epoch and saves_per_epoch need the number of steps of an epoch."""
    steps, epochs = _num_steps(draft), draft.value_of("num_epochs", 1)
    evaluates = any(draft.value_of(f"data.{name}") is not None for name in ("eval_fraction", "eval_source"))
    if not evaluates:
        draft.set("eval_every_steps", 0, *draft.given("evals_per_epoch"))
    for key, ours in (("evals_per_epoch", "eval_every_steps"), ("saves_per_epoch", "checkpoint.every_steps")):
        if draft.get(key) is None or draft.value_of(ours) is not None:
            continue
        number = draft.number(key, 0.0)
        if number <= 0:
            draft.set(ours, 0, key)
        elif steps is None:
            draft.drop(key, BY_DESIGN, f"{ours} counts steps")
            draft.ask(ours, f"steps of an epoch / {number:g}; --num-steps N computes it")
        else:
            draft.set(ours, max(1, int(steps / epochs / number)), key, note="counted in steps")


def _fsdp(draft: Draft, name: str) -> tuple[str, Any]:
    """Key and value of a setting of FSDP, which may have the prefix fsdp_."""
    for key in (f"fsdp_config.{name}", f"fsdp_config.fsdp_{name}"):
        if draft.get(key) is not None:
            return key, draft.get(key)
    return f"fsdp_config.{name}", None


def _set_offload(draft: Draft) -> None:
    for name, ours in (
        ("offload_params", "parallel.cpu_offload"),
        ("reshard_after_forward", "parallel.reshard_after_forward"),
    ):
        key, value = _fsdp(draft, name)
        if value is not None:
            draft.set(ours, value is True, key)
    for name in draft.section("fsdp_config"):
        if str(name).removeprefix("fsdp_") not in (
            "offload_params",
            "reshard_after_forward",
            "activation_checkpointing",
        ):
            draft.drop(f"fsdp_config.{name}", NOT_NEEDED, "FSDP2 shards every block, always")
