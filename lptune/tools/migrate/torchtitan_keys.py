"""The keys of torchtitan whose meaning does not depend on others, and the table of all keys."""

import math
from typing import Any

from lptune.tools.migrate.common import ADAM, DECAY, MASTER
from lptune.tools.migrate.draft import (
    BY_DESIGN,
    NOT_NEEDED,
    NOT_OFFERED,
    OFF,
    Draft,
    Rules,
    choice,
    drop,
    each,
    if_on,
    integer_to,
    later,
    number_to,
    to,
)


def _compile(draft: Draft, key: str, value: Any) -> None:
    parts = draft.names("compile.components") or ["model"]
    draft.set("compile", "block" if value is True and "model" in parts else "none", key)


def _reshard(draft: Draft, key: str, value: Any) -> None:
    if value == "default":
        draft.drop(key, NOT_NEEDED, "null, the default, means the same")
    else:
        draft.set("parallel.reshard_after_forward", value == "always", key)


def _checkpointing(draft: Draft, key: str, value: Any) -> None:
    option = str(draft.get("activation_checkpoint.selective_ac_option", "2"))
    by_layer = value == "selective" and option.isdigit()
    note = f"there every {option}th block is recomputed whole; here each keeps its GEMM and attention outputs"
    choices = dict.fromkeys(("selective",), ("selective", note if by_layer else ""))
    choice("activation_checkpointing", {**choices, "full": ("full", ""), "none": ("none", "")})(
        draft, key, value
    )


def _seed(draft: Draft, key: str, value: Any) -> None:
    draft.set("seed", draft.integer(key, 0, 0), key, note="data are shuffled here, and in file order there")


def _wandb(draft: Draft, key: str, value: Any) -> None:
    if value is True:
        draft.set("logging.wandb_project", "torchtitan", key, note="there WANDB_PROJECT, if it is set")
    else:
        draft.drop(key, OFF)


def _export_dtype(draft: Draft, key: str, value: Any) -> None:
    if draft.get("checkpoint.enable", draft.get("checkpoint.enable_checkpoint", False)):
        draft.set("export.dtype", value, key)
    else:
        draft.drop(key, OFF, "checkpoint.enable is false")


def _dtype(draft: Draft, key: str, value: Any) -> None:
    """training.dtype: of the parameters themselves."""
    if value == "bfloat16":
        draft.set("compute_dtype", "bfloat16", key, note=MASTER)
    else:
        draft.drop(key, NOT_NEEDED, "master weights are float32")


def _profiling(draft: Draft, key: str, value: Any) -> None:
    section = draft.section(key)
    if section.get("enable_profiling") or section.get("enable_memory_snapshot"):
        draft.drop(key, NOT_OFFERED, "use torch.profiler in a copy of the recipe")
    else:
        draft.drop(key, OFF)


def _param_groups(draft: Draft, key: str, value: Any) -> None:
    """Since 2026, each pattern of names has an optimizer of its own; one that matches all is AdamW here."""
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


def _validator(draft: Draft, key: str, value: Any) -> None:
    draft.drop(key, NOT_OFFERED, "its data are named by a Python class")
    draft.ask("data.eval_source", f"held-out data, and eval_every_steps: {key} names its data by a class")


_WRITES = drop(NOT_NEEDED, "what a run writes is in output_dir")
_FROM_CONFIG = drop(NOT_NEEDED, "family and sizes are read from config.json in model.path")
_YAML = drop(NOT_NEEDED, "OUTPUT_DIR/config.yaml holds every key")
_CODE = drop(BY_DESIGN, "a config names no code; copy a recipe with `lptune cp`")
_MOE = drop(NOT_OFFERED, "there are no mixtures of experts")
_WHOLE = drop(BY_DESIGN, "the last checkpoint is whole; OUTPUT_DIR/export holds the model")
_PIPELINE = drop(NOT_OFFERED, "there is no pipeline parallelism")
_CONTEXT = drop(NOT_OFFERED, "there is no context parallelism")
_GARBAGE = drop(NOT_NEEDED, "garbage is not collected between steps")
_PARALLEL = {
    "data_parallel_replicate_degree": integer_to("parallel.replicate"),
    "data_parallel_shard_degree": drop(NOT_NEEDED, "the ranks that remain shard the model"),
    **each("{tensor,context,pipeline}_parallel_degree", later),
    **each("pipeline_parallel_{schedule,schedule_csv,microbatch_size,layers_per_stage}", _PIPELINE),
    **each("pipeline_parallel_{first_stage_less_layers,last_stage_less_layers}", _PIPELINE),
    **each("num_pp_microbatches module_fqns_per_model_part", _PIPELINE),
    "enable_sequence_parallel": to("parallel.sequence"),
    **each("enable_fsdp_symm_mem spmd_backend", drop(NOT_NEEDED, "FSDP2's own collectives")),
    "fsdp_reshard_after_forward": _reshard,
    "enable_async_tensor_parallel": if_on(NOT_OFFERED, "sequence parallelism gathers in 8 bits instead"),
    "disable_loss_parallel": if_on(NOT_OFFERED, "the loss is computed on the shards of the vocabulary"),
    **each("{expert,expert_tensor}_parallel_degree", _MOE),
    **each("context_parallel_{rotate_method,load_balancer,ptrr_mask_key}", _CONTEXT),
}

RULES: Rules = {
    **each("job.dump_folder dump_folder", to("output_dir")),
    "job.description": drop(NOT_NEEDED, "name the folder, output_dir, after the run"),
    **each("job.{print_config,print_args} debug.print_config debug.save_config_file", _YAML),
    "model_spec": _FROM_CONFIG,
    "loss": drop(NOT_NEEDED, "the recipe computes the cross-entropy, in chunks"),
    "dataloader": later,
    "validator": _validator,
    "optimizer.param_groups": _param_groups,
    "training.num_tokens_per_train_step": later,
    "training.disable_cuda_graphs": drop(NOT_NEEDED, "CUDA graphs are not used"),
    **each("job.custom_config_module experimental.{custom_args_module,custom_import}", _CODE),
    "profiling": _profiling,
    "metrics.log_freq": drop(NOT_NEEDED, "every step is in metrics.jsonl"),
    "metrics.disable_color_printing": drop(NOT_NEEDED, "NO_COLOR"),
    "metrics.enable_tensorboard": to("logging.tensorboard"),
    "metrics.enable_wandb": _wandb,
    **each("metrics.save_tb_folder checkpoint.folder", _WRITES),
    **each("model.{name,flavor,norm_type}", _FROM_CONFIG),
    "model.print_after_conversion": drop(NOT_NEEDED, "precision_plan.json names every layer"),
    **each("model.{hf_assets_path,tokenizer_path,converters} hf_assets_path", later),
    "optimizer.name": choice("optimizer.kind", {"adamw": ("adamw", ""), "adam": ("adamw", ADAM)}),
    "optimizer.lr": number_to("optimizer.lr"),
    "optimizer.beta1": number_to("optimizer.beta1"),
    "optimizer.beta2": number_to("optimizer.beta2"),
    "optimizer.eps": number_to("optimizer.eps"),
    "optimizer.weight_decay": number_to("optimizer.weight_decay", DECAY),
    **each("optimizer.{implementation,fused}", drop(NOT_NEEDED, "fused where the device has it")),
    "optimizer.early_step_in_backward": if_on(
        NOT_OFFERED, "parallel.reduce_every_micro_batch keeps fewer gradients"
    ),
    **each("lr_scheduler.{warmup_steps,decay_ratio,decay_type,lr_decay_type}", later),
    **each("lr_scheduler.{min_lr_factor,lr_min}", number_to("schedule.min_lr_ratio")),
    "lr_scheduler.total_steps": drop(NOT_OFFERED, "the schedule ends with the run"),
    **each("training.{dataset,dataset_path,batch_size,local_batch_size,global_batch_size}", later),
    **each("training.{max_context_length,num_tokens_per_microbatch_per_dp_rank}", later),
    "training.seq_len": integer_to("data.seq_len", minimum=2),
    "training.max_norm": number_to("max_grad_norm"),
    "training.steps": integer_to("num_steps"),
    "training.enable_cpu_offload": to("parallel.cpu_offload"),
    "training.dtype": _dtype,
    "training.mixed_precision_param": to("compute_dtype"),
    "training.mixed_precision_reduce": drop(NOT_NEEDED, "gradients are reduced in float32"),
    **each("training.{gc_freq,gc_debug}", _GARBAGE),
    "training.dataloader": drop(NOT_NEEDED, "rows are mapped from the cache; there are no workers"),
    **each("training.compile compile.enable", _compile),
    "compile.components": drop(NOT_NEEDED, "blocks are compiled; the loss has a chunked form of its own"),
    "compile.backend": drop(NOT_NEEDED, "inductor"),
    **each("training.seed debug.seed", _seed),
    **each("training.deterministic debug.deterministic", to("deterministic")),
    **{
        f"{section}.{name}": rule
        for section in ("parallelism", "training", "experimental")
        for name, rule in _PARALLEL.items()
    },
    **each("checkpoint.{enable,enable_checkpoint,interval,keep_latest_k,async_mode}", later),
    **each("checkpoint.{initial_load_path,initial_load_in_hf}", later),
    **each("checkpoint.{last_save_model_only,model_weights_only}", _WHOLE),
    "checkpoint.last_save_in_hf": drop(NOT_NEEDED, "OUTPUT_DIR/export is always a Hugging Face folder"),
    "checkpoint.export_dtype": _export_dtype,
    "checkpoint.initial_load_model_only": drop(NOT_NEEDED, "model.path holds weights alone"),
    "checkpoint.load_step": drop(BY_DESIGN, "resume takes the path of a checkpoint"),
    "checkpoint.exclude_from_loading": drop(NOT_OFFERED),
    "activation_checkpoint.mode": _checkpointing,
    **each("activation_checkpoint.{determinism_check,debug}", drop(NOT_NEEDED, "torch's defaults")),
    "activation_checkpoint.selective_ac_option": drop(BY_DESIGN, "selective is one policy, of operations"),
    "activation_checkpoint.preserve_rng_state": drop(NOT_NEEDED, "random bits depend on seed, step, layer"),
    **each("quantize.{linear,dense}.float8 float8 quantize.linear.mx quantize.dense.mx mx", later),
    **each("quantize.grouped_mm quantize.moe", _MOE),
    "validation": later,
    "comm": drop(NOT_NEEDED, "a failed rank ends all ranks within seconds"),
    "fault_tolerance": drop(NOT_OFFERED, "a run continues from its checkpoint"),
    "memory_estimation": drop(NOT_NEEDED, "`lptune plan` estimates memory"),
}
