"""The JSON of its config that torchtitan writes when a run starts (`--debug.save_config_file`).

torchtitan's configs are Python functions (TOML until February 2026), which are not run here. Keys and
defaults are those of torchtitan at b5bcd76c6 (August 2026). The file has all fields of the config. It does
not say in which precision layers multiply: that is a matter of the model's classes, whose names it lacks.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lptune.tools.migrate.draft import (
    BY_DESIGN,
    DECAY,
    MASTER,
    NOT_NEEDED,
    NOT_OFFERED,
    OFF,
    Draft,
    Rules,
    drop,
    each,
    if_on,
    integer_to,
    later,
    number_to,
    refuse,
    set_batches,
    set_defaults,
    to,
    walk,
)

_FAMILIES = ("llama3", "qwen3")
_SHARES = ("tensor", "context", "pipeline")
_TOKENS = "training.num_tokens_per_microbatch_per_dp_rank"
_TOKENS_OF_ALL = "training.num_tokens_per_train_step"
_EXPERT = "parallelism.expert_parallel_degree"
_LENGTH = "training.max_context_length"
_FROM_SCRATCH = (
    "torchtitan starts from random weights unless checkpoint.initial_load_path says otherwise; here those in "
    "model.path are trained. `lptune new-checkpoint` makes a folder with random ones"
)
_ROWS = (
    "documents are joined and cut into rows there, with attention across them; here they are packed by best "
    "fit, and attention stays within a document"
)
_DECAYS = {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}


def fill(draft: Draft) -> None:
    """Fills `draft` from a torchtitan config."""
    name = str(draft.get("model_spec.name", ""))
    if "flux" in name:
        raise refuse(draft, "trains a model of images", "")
    draft.recipe = "continued_pretrain"
    walk(draft, RULES)
    _set_model(draft, name)
    _set_source(draft, "dataloader", "")
    _set_batches(draft)
    _set_schedule(draft)
    _set_checkpoints(draft)
    set_defaults(draft, {"activation_checkpointing": "none", "compile": "none", "eval_every_steps": 0})
    draft.ask(
        "precision.kind", "the file does not say whether layers run in float8, MX or NVFP4; set what they did"
    )


def _set_model(draft: Draft, name: str) -> None:
    key, path = "hf_assets_path", draft.get("checkpoint.initial_load_path")
    if path is not None and draft.get("checkpoint.initial_load_in_hf"):
        draft.set("model.path", path, "checkpoint.initial_load_path", "checkpoint.initial_load_in_hf")
        draft.drop(key, NOT_NEEDED, "the tokenizer is read from model.path")
    else:
        draft.drop_given(OFF, "", "checkpoint.initial_load_in_hf")
        draft.set("model.path", draft.get(key, "FILL-IN"), *draft.given(key), note=_FROM_SCRATCH)
        if path is not None:
            why = "its .metadata is a pickle; only safetensors are read"
            draft.drop("checkpoint.initial_load_path", NOT_OFFERED, why)
            draft.ask("model.path", "a Hugging Face folder of the weights in checkpoint.initial_load_path")
    if name not in _FAMILIES:
        draft.ask("model.path", f"model_spec.name {name}: see whether lptune trains it (docs/models.md)")


def _set_source(draft: Draft, section: str, prefix: str) -> None:
    """data.source, its split and format from `section`; of held-out data with the prefix eval_."""
    found = list(_sources(draft.section(section)))
    key = f"data.{prefix}source"
    if len(found) != 1:
        draft.drop_given(NOT_OFFERED, "data that are named by several sources, or by none", section)
        draft.set(key, "FILL-IN.jsonl")
        draft.ask(key, f"{section} names {len(found)} sources; give a file, a hub id or a list of them")
        return
    ((source, reads_text),) = found
    path, name, split = (source.get(each) for each in ("path", "name", "split"))
    draft.set(key, f"{path}:{name}" if name else path, section, note=_ROWS)
    if split is not None:
        draft.set(f"data.{prefix}split", split, section, note=_ROWS)
    if not prefix:
        draft.set("data.format", "text" if reads_text else "chat", section, note=_ROWS)
        if str(path).startswith("allenai/c4"):
            draft.ask("data.max_rows", "c4 is read whole before the first step: limit it, or name files")
        if not reads_text:
            draft.ask("data.format", "chat or pairs, and the columns: a Python function makes messages there")


def _sources(section: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """The sections below that name a data set, each with whether its rows are plain texts."""
    source, processor = section.get("source"), section.get("processor")
    if isinstance(source, Mapping) and isinstance(source.get("path"), str):
        yield source, not isinstance(processor, Mapping) or "text_fn" in processor
        return
    for value in section.values():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Mapping):
                yield from _sources(inner)


def _set_batches(draft: Draft) -> None:
    """Rows from tokens; parallel.tensor and context, whose ranks share each row; and parallel.expert."""
    shared = 1
    for name in _SHARES:
        key = f"parallelism.{name}_parallel_degree"
        degree = draft.integer(key, 1)
        shared *= degree
        if degree <= 1:
            draft.drop_given(OFF, "", key)
        elif name != "pipeline":
            draft.set(f"parallel.{name}", degree, key)
        else:
            draft.drop(key, NOT_OFFERED, "there is no pipeline parallelism")
            draft.ask("parallel", f"{key} = {degree}: use parallel.tensor and more ranks of FSDP")
    degree = draft.integer(_EXPERT, 1)
    if degree <= 1:
        draft.drop_given(OFF, "", _EXPERT)
    elif shared == 1:
        draft.set("parallel.expert", degree, _EXPERT)
    else:
        draft.drop(_EXPERT, NOT_OFFERED, "parallel.expert stands beside neither tensor nor context")
    length = draft.integer(_LENGTH, 2048, 2)
    draft.set("data.seq_len", length, *draft.given(_LENGTH))
    size = max(1, draft.integer(_TOKENS, 16384) // length)
    per_step = draft.integer(_TOKENS_OF_ALL, -1, -1)
    keys = draft.given(_TOKENS)
    if per_step > 0:
        set_batches(draft, (size, keys), (per_step // length, [_TOKENS_OF_ALL]), shared)
    else:
        set_batches(draft, (size, keys), (None, keys), shared)
        draft.drop_given(OFF, "", _TOKENS_OF_ALL)


def _set_schedule(draft: Draft) -> None:
    steps = draft.integer("training.steps", 10000)
    warmup = min(draft.integer("lr_scheduler.warmup_steps", 200, 0), steps)
    kind = str(draft.get("lr_scheduler.decay_type", "linear"))
    if kind not in _DECAYS:
        draft.ask("schedule.kind", f"lr_scheduler.decay_type {kind} is not offered")
        kind = "linear"
    keys = draft.given("lr_scheduler.decay_ratio", "lr_scheduler.decay_type")
    ratio = draft.number("lr_scheduler.decay_ratio", -1.0)
    decay = min(round(steps * ratio), steps - warmup) if ratio >= 0 else steps - warmup
    if decay == 0:
        draft.set("schedule.kind", "constant", *keys)
    elif decay == steps - warmup and kind != "sqrt":
        draft.set("schedule.kind", kind, *keys)
    else:
        draft.set("schedule.kind", "wsd", *keys)
        draft.set("schedule.decay_steps", decay, *keys)
        draft.set("schedule.decay_shape", _DECAYS[kind], *keys)
    draft.set("schedule.warmup_steps", warmup, *draft.given("lr_scheduler.warmup_steps"))


def _set_checkpoints(draft: Draft) -> None:
    interval, keep, mode, dtype = (
        f"checkpoint.{name}" for name in ("interval", "keep_latest_k", "async_mode", "export_dtype")
    )
    if not draft.get("checkpoint.enable", False):
        always = "a run always saves at its end, and every checkpoint.every_minutes=30"
        draft.drop_given(BY_DESIGN, always, "checkpoint.enable")
        draft.drop_given(OFF, "checkpoint.enable is false", interval, keep, mode, dtype)
        return
    every = draft.integer(interval, 500)
    draft.set("checkpoint.every_steps", every, "checkpoint.enable", *draft.given(interval))
    number = draft.integer(keep, 10, 0)
    note = "" if number else "0 keeps all there; keep_every=N keeps every Nth step here"
    draft.set("checkpoint.keep_last", number or 10, *draft.given(keep), note=note)
    draft.set("checkpoint.async_save", draft.get(mode, "disabled") != "disabled", *draft.given(mode))
    draft.set("export.dtype", draft.get(dtype, "float32"), *draft.given(dtype))


def _validator(draft: Draft, key: str, value: Any) -> None:
    if not draft.section(key).get("enable"):
        draft.set("eval_every_steps", 0, f"{key}.enable")
        draft.drop(key, OFF, "validator.enable is false")
        return
    draft.set("eval_every_steps", draft.integer(f"{key}.freq", 10), f"{key}.enable", f"{key}.freq")
    draft.drop_given(BY_DESIGN, "all held-out rows are evaluated; name a file with fewer", f"{key}.steps")
    _set_source(draft, f"{key}.dataloader", "eval_")


def _checkpointing(draft: Draft, key: str, value: Any) -> None:
    """The policy is a class, known by its fields."""
    section = draft.section(key)
    if "memory_budget" in section:
        draft.ask("activation_checkpointing", "none, selective or full in place of a memory budget")
    is_selective = "force_recompute_mm_shapes_by_fqns" in section
    draft.set("activation_checkpointing", "selective" if is_selective else "full")
    draft.drop(key, NOT_NEEDED, "the policy's own settings; random bits depend on seed, step and layer")


def _compile(draft: Draft, key: str, value: Any) -> None:
    parts = draft.names("compile.components")
    draft.set("compile", "block" if value is True and "model" in parts else "none", key)


def _reshard(draft: Draft, key: str, value: Any) -> None:
    if value == "default":
        draft.drop(key, NOT_NEEDED, "null, the default, means the same")
    else:
        draft.set("parallel.reshard_after_forward", value == "always", key)


def _seed(draft: Draft, key: str, value: Any) -> None:
    draft.set("seed", draft.integer(key, 0, 0), key, note="of weights there; here also of the order of rows")


def _wandb(draft: Draft, key: str, value: Any) -> None:
    if value is True:
        draft.set("logging.wandb_project", "torchtitan", key, note="there WANDB_PROJECT, if it is set")
    else:
        draft.drop(key, OFF)


def _dtype(draft: Draft, key: str, value: Any) -> None:
    """training.dtype: of the parameters themselves."""
    if value == "bfloat16":
        draft.set("compute_dtype", "bfloat16", key, note=MASTER)
    else:
        draft.drop(key, NOT_NEEDED, "master weights are float32")


def _profiler(draft: Draft, key: str, value: Any) -> None:
    section = draft.section(key)
    if section.get("enable_profiling") or section.get("enable_memory_snapshot"):
        draft.drop(key, NOT_OFFERED, "use torch.profiler in a copy of the recipe")
    else:
        draft.drop(key, OFF)


def _param_groups(draft: Draft, key: str, value: Any) -> None:
    """Each pattern of names has an optimizer of its own; one that matches all is AdamW here."""
    group = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) else {}
    if group.get("pattern") != ".*" or group.get("optimizer_name") != "AdamW":
        draft.drop(key, NOT_OFFERED, "one AdamW for all parameters; no other groups or optimizers")
        draft.ask("optimizer.lr", f"and the other keys of optimizer: {key} is not one AdamW")
        return
    draft.set("optimizer.kind", "adamw", f"{key}[0].optimizer_name")
    draft.drop(f"{key}[0].pattern", NOT_NEEDED, "it matches all parameters")
    arguments = group.get("optimizer_kwargs")
    for name, item in arguments.items() if isinstance(arguments, dict) else ():
        theirs = f"{key}[0].optimizer_kwargs.{name}"
        if name in ("lr", "eps", "weight_decay") and _is_number(item):
            draft.set(f"optimizer.{name}", float(item), theirs, note=DECAY if name == "weight_decay" else "")
        elif name == "betas" and isinstance(item, list) and len(item) == 2 and all(map(_is_number, item)):
            draft.set("optimizer.beta1", float(item[0]), theirs)
            draft.set("optimizer.beta2", float(item[1]), theirs)
        else:
            raise draft.error(theirs, f"is not known, or not a number: {item!r:.60}")
    if not isinstance(arguments, dict):
        raise draft.error(key, "its group has no optimizer_kwargs")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_PIPELINE = drop(NOT_NEEDED, "there is no pipeline parallelism")
_DEBUG = if_on(NOT_OFFERED, "a copy of the recipe (`lptune cp`) can have it")

RULES: Rules = {
    "dump_folder": to("output_dir"),
    "model_spec": drop(NOT_NEEDED, "family and sizes are read from config.json in model.path"),
    "hf_assets_path": later,
    "tokenizer": drop(NOT_NEEDED, "the tokenizer is read from model.path"),
    "loss": drop(NOT_NEEDED, "the recipe computes the cross-entropy, in chunks"),
    "dataloader": later,
    "validator": _validator,
    "profiler": _profiler,
    "metrics.log_freq": drop(NOT_NEEDED, "every step is in metrics.jsonl"),
    "metrics.disable_color_printing": drop(NOT_NEEDED, "NO_COLOR"),
    "metrics.enable_tensorboard": to("logging.tensorboard"),
    "metrics.enable_wandb": _wandb,
    "metrics.save_for_all_ranks": if_on(NOT_OFFERED, "metrics are means over the ranks"),
    **each(
        "metrics.save_tb_folder checkpoint.folder", drop(NOT_NEEDED, "what a run writes is in output_dir")
    ),
    "optimizer.param_groups": _param_groups,
    "optimizer.implementation": drop(NOT_NEEDED, "fused where the device has it"),
    **each("lr_scheduler.{warmup_steps,decay_ratio,decay_type}", later),
    "lr_scheduler.min_lr_factor": number_to("schedule.min_lr_ratio"),
    "lr_scheduler.total_steps": drop(NOT_OFFERED, "the schedule ends with the run"),
    **each(
        "training.{max_context_length,num_tokens_per_microbatch_per_dp_rank,num_tokens_per_train_step}", later
    ),
    "training.max_norm": number_to("max_grad_norm"),
    "training.steps": integer_to("num_steps"),
    "training.enable_cpu_offload": to("parallel.cpu_offload"),
    "training.disable_cuda_graphs": drop(NOT_NEEDED, "CUDA graphs are not used"),
    "training.dtype": _dtype,
    "training.mixed_precision_param": to("compute_dtype"),
    "training.mixed_precision_reduce": drop(NOT_NEEDED, "gradients are reduced in float32"),
    **each("training.{gc_freq,gc_debug}", drop(NOT_NEEDED, "garbage is not collected between steps")),
    "parallelism.data_parallel_replicate_degree": integer_to("parallel.replicate"),
    "parallelism.data_parallel_shard_degree": drop(NOT_NEEDED, "the ranks that remain shard the model"),
    **each("parallelism.{tensor,context,pipeline}_parallel_degree", later),
    **each("parallelism.pipeline_parallel_{schedule,schedule_csv,layers_per_stage}", _PIPELINE),
    **each("parallelism.pipeline_parallel_{first,last}_stage_less_layers", _PIPELINE),
    **each("parallelism.{num_pp_microbatches,module_fqns_per_model_part}", _PIPELINE),
    "parallelism.enable_sequence_parallel": to("parallel.sequence"),
    **each("parallelism.{enable_fsdp_symm_mem,spmd_backend}", drop(NOT_NEEDED, "FSDP2's own collectives")),
    "parallelism.fsdp_reshard_after_forward": _reshard,
    _EXPERT: later,
    **each(
        "parallelism.context_parallel_{load_balancer,ptrr_mask_key}",
        drop(NOT_NEEDED, "ranks exchange heads, in no turns"),
    ),
    "compile.enable": _compile,
    "compile.enable_async_tensor_parallel": if_on(
        NOT_OFFERED, "sequence parallelism gathers in 8 bits instead"
    ),
    "compile.components": drop(NOT_NEEDED, "blocks are compiled; the loss has a chunked form of its own"),
    "compile.backend": drop(NOT_NEEDED, "inductor"),
    "activation_checkpoint": _checkpointing,
    **each("checkpoint.{enable,interval,keep_latest_k,async_mode,export_dtype}", later),
    **each("checkpoint.{initial_load_path,initial_load_in_hf}", later),
    "checkpoint.initial_load_in_hf_quantized": drop(NOT_NEEDED, "config.json says how weights are stored"),
    "checkpoint.initial_load_model_only": drop(NOT_NEEDED, "model.path holds weights alone"),
    "checkpoint.last_save_model_only": drop(BY_DESIGN, "the last checkpoint is whole"),
    "checkpoint.last_save_in_hf": drop(NOT_NEEDED, "OUTPUT_DIR/export is always a Hugging Face folder"),
    "checkpoint.load_step": drop(BY_DESIGN, "resume takes the path of a checkpoint"),
    **each(
        "checkpoint.{exclude_from_loading,enable_first_step_checkpoint,create_seed_checkpoint,load_only}",
        if_on(NOT_OFFERED),
    ),
    "debug.seed": _seed,
    "debug.deterministic": to("deterministic"),
    **each("debug.{print_config,save_config_file}", drop(NOT_NEEDED, "OUTPUT_DIR/config.yaml has every key")),
    **each("debug.{spmd_typechecking,deterministic_warn_only,moe_force_load_balance}", _DEBUG),
    **each("debug.{detect_anomaly,batch_invariant}", _DEBUG),
    "debug.enable_structured_logging": drop(NOT_NEEDED, "metrics.jsonl is structured"),
    "override.imports": drop(BY_DESIGN, "a config names no code; copy a recipe with `lptune cp`"),
    "comm": drop(NOT_NEEDED, "a failed rank ends all ranks within seconds"),
}
