"""Arguments of transformers' Trainer, which axolotl, LLaMA-Factory and TRL hand on under its names.

Names and defaults are those of transformers.TrainingArguments, 4.57 to 5.23 (those that 5 removed included).
"""

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from lptune.tools.migrate.draft import (
    BY_DESIGN,
    NOT_NEEDED,
    NOT_OFFERED,
    OFF,
    OTHER_BITS,
    PAGED,
    WARMUP,
    Draft,
    Rule,
    Rules,
    choice,
    drop,
    each,
    if_on,
    integer_to,
    later,
    number_to,
    set_accumulated,
    set_defaults,
    to,
)

SCHEDULES = {
    "cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
}  # fmt: skip
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), ("adamw", "")),
    **dict.fromkeys(
        ("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "ao_adamw_8bit"), ("adamw_8bit", "")
    ),
    **dict.fromkeys(("ao_adamw_4bit", "adamw_torch_4bit", "ao_adamw_fp8"), ("adamw_8bit", OTHER_BITS)),
    "paged_adamw_32bit": ("adamw", PAGED),
    "muon": ("muon", ""),
    "paged_adamw_8bit": ("adamw_8bit", PAGED),
}
_DEFAULTS = {
    "num_epochs": 3, "optimizer.lr": 5e-5, "optimizer.beta2": 0.999, "data.packing": False, "seed": 42,
}  # fmt: skip


def fill_arguments(draft: Draft, defaults: Mapping[str, object], recomputes: bool = False) -> None:
    """What follows from several arguments, after the walk with `RULES`; and the Trainer's defaults.

    defaults: those of the tool that differ from the Trainer's. recomputes: whether the tool checkpoints
    activations without being told.
    """
    set_accumulated(draft, "per_device_train_batch_size", 8)
    _set_schedule(draft)
    set_offload(draft)
    set_recomputation(draft, recomputes)
    draft.set("compile", "block" if draft.get("torch_compile") else "none", *draft.given("torch_compile"))
    evaluates = any(draft.value_of(f"data.{name}") is not None for name in ("eval_fraction", "eval_source"))
    if not evaluates:
        draft.set("eval_every_steps", 0, *draft.given("eval_steps"))
    set_defaults(draft, _DEFAULTS | dict(defaults))
    if draft.get("save_steps") is not None and draft.get("save_total_limit") is None:
        draft.assumed.append(
            "the newest 2 checkpoints are enough. All are kept there without save_total_limit; "
            "checkpoint.keep_last=N keeps more."
        )


_LONGER = {
    "full_dpo": "twice theirs, for both answers with their prompts; longer preferences are dropped",
    "full_kto": "longer answers are dropped",
}


def of_row(draft: Draft, length: int) -> int:
    """data.seq_len for documents of `length` tokens: a row of preferences holds two, and cuts none."""
    return length * (2 if draft.recipe == "full_dpo" else 1)


def row_length(draft: Draft, key: str, value: Any) -> None:
    """data.seq_len from the length of a document."""
    note = _LONGER.get(draft.recipe, "longer pairs and chats are cut")
    draft.set("data.seq_len", of_row(draft, draft.integer(key, 1, 2)), key, note=note)


def _set_schedule(draft: Draft) -> None:
    key, more = "lr_scheduler_type", "lr_scheduler_kwargs"
    name = str(draft.get(key, "linear"))
    options = draft.get(more, {})
    if name == "cosine_with_min_lr" and isinstance(options, Mapping) and "min_lr_rate" in options:
        draft.set("schedule.kind", "cosine", key)
        draft.set("schedule.min_lr_ratio", draft.number(f"{more}.min_lr_rate", 0.0), more)
    elif name in SCHEDULES:
        draft.set("schedule.kind", SCHEDULES[name], *draft.given(key))
        draft.drop_given(NOT_OFFERED, "", more)
    else:
        draft.drop_given(NOT_OFFERED, f"{name}: cosine, linear, constant and wsd are offered", key, more)
        draft.ask("schedule.kind", f"{key}: {name} is not offered")
    set_warmup(draft, name)


def set_warmup(draft: Draft, schedule: str, ratio: float | None = None, limit: int | None = None) -> None:
    """schedule.warmup_steps from warmup_steps, a number of steps or a share below 1, and warmup_ratio.

    schedule: their name of it. ratio, limit: where neither key is there.
    """
    if schedule == "constant":  # of transformers, which takes a warmup and ignores it
        why = "the schedule constant has no warmup there"
        draft.drop_given(OFF, why, "warmup_steps", "warmup_ratio")
        return
    count = draft.get("warmup_steps")
    if isinstance(count, float) and 0 < count < 1:
        _share_of_steps(draft, draft.number("warmup_steps", 0.0), "warmup_steps")
    elif count is not None and (count != 0 or draft.get("warmup_ratio") is None):
        draft.set("schedule.warmup_steps", draft.integer("warmup_steps", 0, 0), "warmup_steps", note=WARMUP)
        draft.drop_given(OFF, "warmup_steps holds", "warmup_ratio")
    else:
        draft.drop_given(OFF, "", "warmup_steps")
        if draft.get("warmup_ratio") is not None:
            _share_of_steps(draft, draft.number("warmup_ratio", 0.0), "warmup_ratio")
        elif ratio is not None:
            _share_of_steps(draft, ratio, limit=limit)


def _share_of_steps(draft: Draft, ratio: float, *keys: str, limit: int | None = None) -> None:
    extra = f", at most {limit} steps there" if limit else ""
    note = f"{ratio:g} of the steps{extra}; {WARMUP}"
    steps = known_steps(draft)
    if steps is None and ratio:
        draft.set("schedule.warmup_steps", 0, *keys, note=note)
        draft.ask("schedule.warmup_steps", f"{ratio:g} of the run's steps{extra}; --num-steps N computes it")
    else:
        count = int(ratio * (steps or 0)) if limit else -int(-ratio * (steps or 0) // 1)
        draft.set("schedule.warmup_steps", min(count, limit or count), *keys, note=note)


def known_steps(draft: Draft) -> int | None:
    """Optimizer steps of the run, if the file or the user says them."""
    steps: int | None = draft.value_of("num_steps")
    return steps or draft.num_steps


def set_recomputation(draft: Draft, default: bool = False) -> None:
    """activation_checkpointing. default: whether the tool recomputes without being told."""
    off = "disable_gradient_checkpointing"
    fsdps, _ = _fsdp(draft, "activation_checkpointing")
    keys = draft.given("gradient_checkpointing", fsdps, off)
    is_on = any(draft.get(key) for key in keys if key != off) or (default and keys in ([], [off]))
    draft.set("activation_checkpointing", "full" if is_on and not draft.get(off) else "none", *keys)


def set_offload(draft: Draft) -> None:
    """parallel.cpu_offload and reshard_after_forward from fsdp_config; its other keys are not needed."""
    for name, ours in (
        ("offload_params", "parallel.cpu_offload"),
        ("reshard_after_forward", "parallel.reshard_after_forward"),
    ):
        key, value = _fsdp(draft, name)
        if value is not None:
            draft.set(ours, value is True, key)
    if isinstance(draft.get("fsdp_config"), str):
        draft.drop("fsdp_config", NOT_NEEDED, "FSDP2 shards every block, always")
        return
    for name, value in draft.section("fsdp_config").items():
        known = ("offload_params", "reshard_after_forward", "activation_checkpointing")
        if value is None:
            draft.drop(f"fsdp_config.{name}", OFF)
        elif str(name).removeprefix("fsdp_") not in known:
            draft.drop(f"fsdp_config.{name}", NOT_NEEDED, "FSDP2 shards every block, always")


def _fsdp(draft: Draft, name: str) -> tuple[str, Any]:
    """Key and value of a setting of FSDP, which may have the prefix fsdp_."""
    for key in (f"fsdp_config.{name}", f"fsdp_config.fsdp_{name}"):
        if draft.get(key) is not None:
            return key, draft.get(key)
    return f"fsdp_config.{name}", None


def set_float8(draft: Draft) -> None:
    """precision.kind and all_gather from fp8, which both tools take to accelerate's float8."""
    key = "fp8_enable_fsdp_float8_all_gather"
    if draft.get("fp8") is True:
        draft.set("precision.kind", "float8_tensorwise", "fp8")
        draft.set("precision.all_gather", "low" if draft.get(key) else "high", *draft.given(key))
    else:
        draft.drop_given(OFF, "", "fp8", key)


def ask_for_source(draft: Draft) -> None:
    """The file names no data."""
    draft.set("data.source", "FILL-IN.jsonl")
    draft.ask("data.source", "a file, a folder, a glob or a hub data set")


def set_held_out(draft: Draft, key: str) -> None:
    """data.eval_fraction from a share, or a number of rows, that is held out."""
    size = draft.number(key, 0.0)
    if size >= 1:
        draft.drop(key, BY_DESIGN, "a share is held out, not a number of rows")
        draft.ask("data.eval_fraction", f"{size:g} / the number of rows")
    elif size > 0:
        note = "of the documents, before they are packed; other rows"
        draft.set("data.eval_fraction", size, key, note=note)
    else:
        draft.drop_given(OFF, "", key)


def set_label_smoothing(draft: Draft, key: str) -> None:
    """preference.label_smoothing, which losses without it refuse."""
    if draft.number(key, 0.0) > 0:
        draft.set("preference.label_smoothing", draft.number(key, 0.0), key)
    else:
        draft.drop_given(OFF, "", key)


# ---- rules


def base_model(draft: Draft, key: str, value: Any) -> None:
    """A folder, or the id of a model that is to be downloaded."""
    name = str(value)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        draft.set("model.path", name, key)
        return
    draft.set("model.path", f"checkpoints/{PurePosixPath(name).name}", key)
    draft.ask("model.path", f"lptune download {name}   (into that folder)")


def bf16(note: str) -> Rule:
    """bfloat16 or, where it is switched off and fp16 is not on, float32. note: of bfloat16."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if value in (True, "auto", "full", "true"):
            draft.set("compute_dtype", "bfloat16", key, note=note)
        elif draft.get("fp16") not in (True, "true"):
            draft.set("compute_dtype", "float32", key)
        else:
            draft.drop(key, OFF)

    return rule


def fp16(draft: Draft, key: str, value: Any) -> None:
    """float16 is to be replaced."""
    if value in (True, "true"):
        draft.drop(key, NOT_OFFERED, "float16 needs a loss scale; bfloat16 or float32")
        draft.ask("compute_dtype", "bfloat16 or float32, in place of float16")
    else:
        draft.drop(key, OFF)


def epochs(draft: Draft, key: str, value: Any) -> None:
    """A number of epochs that may have a fraction."""
    number = draft.number(key, 1.0)
    note = "" if number == int(number) else f"{number} there; num_steps takes a part of an epoch"
    draft.set("num_epochs", max(1, round(number)), key, note=note)


def reinit(draft: Draft, key: str, value: Any) -> None:
    """Random weights are made before the run."""
    if value is True:
        draft.drop(key, NOT_OFFERED, "a run trains the weights in model.path")
        draft.ask("model.path", "a folder with random weights, from `lptune new-checkpoint`")
    else:
        draft.drop(key, OFF)


def _max_steps(draft: Draft, key: str, value: Any) -> None:
    if draft.number(key, -1) <= 0:
        draft.drop(key, OFF)
    else:
        draft.set("num_steps", draft.integer(key, 1), key)


def _report_to(draft: Draft, key: str, value: Any) -> None:
    for name in draft.names(key):
        if name in ("none", "all"):
            draft.drop(key, NOT_NEEDED, "metrics.jsonl and report.html are always written")
        elif name == "tensorboard":
            draft.set("logging.tensorboard", True, key)
        elif name in ("wandb", "trackio"):
            ours = f"logging.{name}_project"
            draft.set(ours, str(draft.get("project", "lptune")), key, *draft.given("project"))
        else:
            draft.drop(key, NOT_OFFERED, f"{name}: TensorBoard, Weights & Biases and Trackio are")


def _project(draft: Draft, key: str, value: Any) -> None:
    """The project of the trackers that have one (`_report_to`)."""
    if not {"wandb", "trackio"}.intersection(draft.names("report_to")):
        draft.drop(key, OFF, "report_to names no tracker with projects")


_LAUNCH = drop(NOT_NEEDED, "FSDP2 shards the model; ranks are a flag of `lptune run`")
_LOGS = drop(NOT_NEEDED, "every step is in metrics.jsonl")
_LOADER = drop(NOT_NEEDED, "rows are prepared once, before the first step, and always shuffled")
_HUB = if_on(NOT_OFFERED, "`hf upload OWNER/NAME RUN/export` sends it")
_KERNEL = drop(NOT_NEEDED, "compilation and the kernels here do this")
_BEST = if_on(BY_DESIGN, "checkpoint.keep_best keeps the best by eval_loss")
_MODE = if_on(NOT_NEEDED, "a run trains, and evaluates every eval_every_steps")

RULES: Rules = {
    "model_name_or_path": base_model,
    "trust_remote_code": if_on(BY_DESIGN, "code of a checkpoint is never run"),
    "output_dir": to("output_dir"),
    **each("overwrite_output_dir do_{train,eval,predict} prediction_loss_only", _MODE),
    **each("per_device_train_batch_size gradient_accumulation_steps", later),
    "per_device_eval_batch_size": drop(NOT_NEEDED, "evaluation takes micro_batch_size"),
    "auto_find_batch_size": if_on(NOT_OFFERED, "`lptune plan --config FILE --device GPU` finds what fits"),
    "num_train_epochs": epochs,
    "max_steps": _max_steps,
    "optim": choice("optimizer.kind", OPTIMIZERS),
    **each("optim_{args,target_modules}", if_on(NOT_OFFERED)),
    "learning_rate": number_to("optimizer.lr"),
    "weight_decay": number_to("optimizer.weight_decay"),
    "adam_beta1": number_to("optimizer.beta1"),
    "adam_beta2": number_to("optimizer.beta2"),
    "adam_epsilon": number_to("optimizer.eps"),
    "max_grad_norm": number_to("max_grad_norm"),
    **each("lr_scheduler_{type,kwargs} warmup_{ratio,steps}", later),
    "label_smoothing_factor": if_on(NOT_OFFERED, "the loss is the cross-entropy of the tokens"),
    "neftune_noise_alpha": if_on(NOT_OFFERED, "no noise on embeddings"),
    "bf16": bf16(""),
    "fp16": fp16,
    **each(
        "tf32 bf16_full_eval fp16_full_eval", if_on(NOT_NEEDED, "what is not 8-bit or bfloat16 is float32")
    ),
    **each("gradient_checkpointing torch_compile", later),
    "gradient_checkpointing_kwargs": drop(NOT_NEEDED, "recomputation is never reentrant"),
    "activation_offloading": if_on(NOT_OFFERED, "activation_checkpointing=full takes least memory"),
    **each("torch_compile_{backend,mode}", drop(NOT_NEEDED, "inductor")),
    **each("use_liger_kernel liger_kernel_config use_cache torch_empty_cache_steps", _KERNEL),
    "attn_implementation": drop(NOT_NEEDED, "the attention backend is chosen by the device"),
    **each("logging_{strategy,steps,first_step,dir,nan_inf_filter} log_level log_on_each_node", _LOGS),
    **each("include_num_input_tokens_seen disable_tqdm skip_memory_metrics debug", _LOGS),
    "report_to": _report_to,
    "run_name": drop(NOT_NEEDED, "the tracker's own environment variables"),
    "project": _project,
    **each("eval_strategy evaluation_strategy", drop(BY_DESIGN, "eval_every_steps decides")),
    "eval_steps": integer_to("eval_every_steps"),
    "eval_on_start": if_on(NOT_NEEDED, "a run evaluates before its first step"),
    **each("eval_delay eval_accumulation_steps batch_eval_metrics", if_on(NOT_OFFERED)),
    "save_steps": integer_to("checkpoint.every_steps"),
    "save_total_limit": integer_to("checkpoint.keep_last"),
    "save_strategy": drop(BY_DESIGN, "checkpoint.every_steps, every_minutes and at_end decide"),
    "save_only_model": if_on(BY_DESIGN, "a checkpoint is whole; OUTPUT_DIR/export holds the model"),
    "save_safetensors": drop(NOT_NEEDED, "always"),
    **each("load_best_model_at_end metric_for_best_model greater_is_better", _BEST),
    **each("push_to_hub hub_{model_id,token,strategy,private_repo,always_push,revision}", _HUB),
    "resume_from_checkpoint": if_on(BY_DESIGN, "resume: auto continues output_dir; theirs are not read"),
    "ignore_data_skip": if_on(NOT_OFFERED, "a resume goes on with the next row"),
    "seed": integer_to("seed", minimum=0),
    "data_seed": if_on(BY_DESIGN, "seed decides the order of rows, too"),
    "full_determinism": if_on(NOT_NEEDED, "runs are bitwise reproducible on one number of ranks"),
    **each("dataloader_{num_workers,pin_memory,drop_last,persistent_workers,prefetch_factor}", _LOADER),
    **each("remove_unused_columns group_by_length train_sampling_strategy length_column_name", _LOADER),
    **each("deepspeed accelerator_config parallelism_config local_rank use_cpu", _LAUNCH),
    **each("fsdp fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params", _LAUNCH),
    "fsdp_config": later,
    **each("ddp_{timeout,find_unused_parameters,bucket_cap_mb,broadcast_buffers,backend}", _LAUNCH),
}
