"""torchtitan's TOML (until February 2026), and the JSON that its Python configs write.

Keys and defaults are those of torchtitan at 238fa9953, the last commit with TOML configs; names of earlier
versions (training.batch_size, [float8], [experimental]) are read, too. A value that is not in the file is
torchtitan's default.
"""

import math
from typing import Any

from lptune.tools.migrate.draft import (
    ADAM,
    BY_DESIGN,
    DECAY,
    IN_BACKWARD,
    MASTER,
    NOT_NEEDED,
    NOT_OFFERED,
    OFF,
    UNKNOWN,
    Draft,
    Rules,
    choice,
    drop,
    each,
    if_on,
    integer_to,
    later,
    number_to,
    refuse,
    set_batches,
    set_defaults,
    switch_on,
    to,
    walk,
)

_FAMILIES = ("llama3", "qwen3", "llama", "llama2")
_SHARES = ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree")
_BATCH = ("training.local_batch_size", "training.batch_size")
_BATCH_OF_ALL = "training.global_batch_size"
_TOKENS = "training.num_tokens_per_microbatch_per_dp_rank"
_TOKENS_OF_ALL = "training.num_tokens_per_train_step"
_MODEL_KEYS = ("model.hf_assets_path", "model.tokenizer_path", "hf_assets_path")
_DATASETS = {
    "c4": ("allenai/c4:en", "train"),
    "c4_validation": ("allenai/c4:en", "validation"),
}
_LAYERS = {
    "output": "lm_head", "attention.wq": "*.q_proj", "attention.wk": "*.k_proj", "attention.wv": "*.v_proj",
    "attention.wo": "*.o_proj", "feed_forward.w1": "*.gate_proj", "feed_forward.w2": "*.down_proj",
    "feed_forward.w3": "*.up_proj", "auto_filter_small_kn": "",
}  # fmt: skip
"""A part of a layer's name there -> the glob here."""

_PREFIXES = {"float8": ("quantize.linear.float8", "quantize.dense.float8", "float8"),
             "mx": ("quantize.linear.mx", "quantize.dense.mx", "mx")}  # fmt: skip
_QUANTIZE_KEYS = {
    "mx": {"recipe_name", "filter_fqns"},
    "float8": {
        "recipe_name", "filter_fqns", "emulate", "enable_fsdp_float8_all_gather",
        "precompute_float8_dynamic_scale_for_fsdp", "force_recompute_fp8_weight_in_bwd",
    },
}  # fmt: skip
"""Those that `_set_mx` and `_set_float8` read."""
_FROM_SCRATCH = (
    "torchtitan starts from random weights unless checkpoint.initial_load_path says otherwise; here those in "
    "model.path are trained. `lptune new-checkpoint` makes a folder with random ones"
)


def fill(draft: Draft) -> None:
    """Fills `draft` from a torchtitan config."""
    name = str(draft.get("model.name", draft.get("model_spec.name", "")))
    if "flux" in name or draft.get("encoder") is not None:
        raise refuse(draft, "trains a model of images", "")
    draft.recipe = "continued_pretrain"
    walk(draft, RULES)
    _set_checkpointing(draft)
    _set_model(draft, name)
    _set_data(draft)
    _set_batches(draft)
    _set_schedule(draft)
    _set_precision(draft)
    _set_validation(draft)
    _set_checkpoints(draft)
    defaults = {
        "num_steps": 10000,
        "data.seq_len": 2048,
        "optimizer.lr": 8e-4,
        "optimizer.weight_decay": 0.1,
        "activation_checkpointing": "selective",
        "compile": "none",
    }
    set_defaults(draft, defaults)


def _set_checkpointing(draft: Draft) -> None:
    """The JSON of 2026 has no mode: the policy is a class, known by its fields."""
    section = draft.section("activation_checkpoint")
    if "param_groups" in draft.section("optimizer") and "mode" not in section:
        if "memory_budget" in section:
            draft.ask("activation_checkpointing", "none, selective or full in place of a memory budget")
        is_selective = "force_recompute_mm_shapes_by_fqns" in section
        mode = "selective" if is_selective else "full" if section else "none"
        draft.set("activation_checkpointing", mode)


def _set_model(draft: Draft, name: str) -> None:
    key = next((each for each in _MODEL_KEYS if draft.get(each) is not None), "model.hf_assets_path")
    path = draft.get("checkpoint.initial_load_path")
    if path is not None and draft.get("checkpoint.initial_load_in_hf"):
        draft.set("model.path", path, "checkpoint.initial_load_path", "checkpoint.initial_load_in_hf")
        draft.drop(key, NOT_NEEDED, "the tokenizer is read from model.path")
    elif key == "model.tokenizer_path" or "tests/assets" in str(draft.get(key, "tests/assets")):
        draft.set("model.path", "FILL-IN", *draft.given(key), note=_FROM_SCRATCH)
        draft.ask(
            "model.path",
            "a folder with config.json, safetensors and tokenizer.json: the file names a tokenizer only",
        )
    else:
        draft.set("model.path", draft.get(key), key, note=_FROM_SCRATCH)
    if path is not None and not draft.get("checkpoint.initial_load_in_hf"):
        draft.drop(
            "checkpoint.initial_load_path",
            NOT_OFFERED,
            "its .metadata is a pickle; only safetensors are read",
        )
        draft.ask("model.path", "a Hugging Face folder of the weights in checkpoint.initial_load_path")
    if name and name not in _FAMILIES:
        draft.ask("model.path", f"model.name {name} is of no family that lptune trains (docs/models.md)")


def _set_data(draft: Draft) -> None:
    name, path = draft.get("training.dataset", "c4_test"), draft.get("training.dataset_path")
    key = "training.dataset"
    keys = draft.given(key, "training.dataset_path")
    note = (
        "documents are read in file order there, joined and cut into rows, with attention across them; here "
        "rows are shuffled, packed by best fit, and attention stays within a document"
    )
    if path is not None:
        draft.set("data.source", path, *keys, note=note)
    elif str(name) in _DATASETS:
        source, split = _DATASETS[str(name)]
        draft.set(
            "data.source", source, *keys, note=f"{note}. It is read whole before the first step, not streamed"
        )
        draft.set("data.split", split, *keys)
        draft.ask(
            "data.max_rows", f"{source} has hundreds of millions of rows: limit what is read, or name files"
        )
    elif draft.get("dataloader") is not None:
        draft.drop("dataloader", NOT_OFFERED, "its data are named by a Python class")
        draft.set("data.source", "FILL-IN.jsonl")
        draft.ask("data.source", "dataloader names the data by a class; give a file or a hub id")
    else:
        draft.set("data.source", "FILL-IN.jsonl", *keys, note=note)
        draft.ask(
            "data.source", f"training.dataset {name} is a name inside torchtitan; give a file or a hub id"
        )
    draft.set("data.format", "text", *keys)


def _degree(draft: Draft, name: str) -> tuple[str, int]:
    for section in ("parallelism", "training", "experimental"):
        if draft.get(f"{section}.{name}") is not None:
            return f"{section}.{name}", draft.integer(f"{section}.{name}", 1, -1)
    return f"parallelism.{name}", 1


def _set_sharing(draft: Draft) -> int:
    """parallel.tensor and context; returns the number of ranks that share each row."""
    shared = 1
    for name in _SHARES:
        key, degree = _degree(draft, name)
        shared *= max(degree, 1)
        if name == "tensor_parallel_degree":
            draft.set("parallel.tensor", degree, *draft.given(key))
        elif name == "context_parallel_degree" and degree > 1:
            draft.set("parallel.context", degree, key)
        elif degree > 1:
            draft.drop(key, NOT_OFFERED, f"{name} {degree}")
            draft.ask("parallel", f"{key} = {degree}: use parallel.tensor and more ranks of FSDP")
        else:
            draft.drop_given(OFF, "", key)
    return shared


def _set_batches(draft: Draft) -> None:
    shared = _set_sharing(draft)
    if draft.get(_TOKENS) is not None:
        _set_batches_by_tokens(draft, shared)
        return
    batch = next((key for key in _BATCH if draft.get(key) is not None), _BATCH[0])
    given = draft.integer(_BATCH_OF_ALL, -1, -1)
    keys = draft.given(batch)
    all_keys = [*keys, *draft.given(_BATCH_OF_ALL)]
    set_batches(draft, (draft.integer(batch, 8), keys), (given if given > 0 else None, all_keys), shared)


def _set_batches_by_tokens(draft: Draft, shared: int) -> None:
    """Since 2026 torchtitan counts tokens, not rows."""
    length = draft.integer("training.max_context_length", 2048, 2)
    draft.set("data.seq_len", length, *draft.given("training.max_context_length"))
    size = max(1, draft.integer(_TOKENS, 1) // length)
    per_step = draft.integer(_TOKENS_OF_ALL, -1, -1)
    given = per_step // length if per_step > 0 else None
    set_batches(draft, (size, [_TOKENS]), (given, [_TOKENS_OF_ALL if given else _TOKENS]), shared)
    if not given:
        draft.drop_given(OFF, "", _TOKENS_OF_ALL)


def _set_schedule(draft: Draft) -> None:
    steps = draft.integer("training.steps", 10000)
    warmup = min(draft.integer("lr_scheduler.warmup_steps", 200, 0), steps)
    shape = {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}
    kind = str(draft.get("lr_scheduler.decay_type", draft.get("lr_scheduler.lr_decay_type", "linear")))
    if kind not in shape:
        draft.ask("schedule.kind", f"lr_scheduler.decay_type {kind} is not offered")
        kind = "linear"
    keys = draft.given("lr_scheduler.decay_ratio", "lr_scheduler.decay_type", "lr_scheduler.lr_decay_type")
    ratio = draft.number("lr_scheduler.decay_ratio", -1.0)
    decay = min(round(steps * ratio), steps - warmup) if ratio >= 0 else steps - warmup
    if decay == 0:
        draft.set("schedule.kind", "constant", *keys)
    elif decay == steps - warmup and kind != "sqrt":
        draft.set("schedule.kind", kind, *keys)
    else:
        draft.set("schedule.kind", "wsd", *keys)
        draft.set("schedule.decay_steps", decay, *keys)
        draft.set("schedule.decay_shape", shape[kind], *keys)
    draft.set("schedule.warmup_steps", warmup,
              *draft.given("lr_scheduler.warmup_steps"))  # fmt: skip


def _converters(draft: Draft) -> str:
    return ",".join(draft.names("model.converters"))


def _set_precision(draft: Draft) -> None:
    """Sections of quantization act only if model.converters names them."""
    converters = _converters(draft)
    for word, prefixes in _PREFIXES.items():
        prefix = next((each for each in prefixes if draft.get(each) is not None), None)
        is_on = any(
            name == word or name.endswith(f".{word}")
            for name in converters.split(",")
            if "grouped" not in name
        )
        if not is_on and prefix is not None:
            draft.drop(prefix, OFF, "model.converters does not name it")
        elif is_on and word == "float8":
            _set_float8(draft, prefix or "quantize.linear.float8")
        elif is_on:
            _set_mx(draft, prefix or "quantize.linear.mx")
        if is_on and prefix is not None:
            for key in sorted(set(draft.section(prefix)) - _QUANTIZE_KEYS[word]):
                draft.drop(f"{prefix}.{key}", UNKNOWN)
    if converters and "precision.kind" not in {each.ours for each in draft.settings}:
        draft.drop("model.converters", NOT_OFFERED, converters)


def _set_mx(draft: Draft, prefix: str) -> None:
    name, key = str(draft.get(f"{prefix}.recipe_name", "mxfp8")), f"{prefix}.recipe_name"
    draft.set("precision.kind", "mxfp8", "model.converters", *draft.given(key))
    if not name.startswith("mxfp8"):
        draft.ask("precision.kind", f"{key}: {name} is not offered, mxfp8 is")
    _set_skip(draft, f"{prefix}.filter_fqns")


def _set_float8(draft: Draft, prefix: str) -> None:
    name, keys = draft.get(f"{prefix}.recipe_name"), ["model.converters"]
    if name is not None:
        keys.append(f"{prefix}.recipe_name")
    kinds = {None: "float8_tensorwise", "tensorwise": "float8_tensorwise"}
    draft.set("precision.kind", kinds.get(name, f"float8_{name}"), *keys)
    key = f"{prefix}.enable_fsdp_float8_all_gather"
    draft.set("precision.all_gather", "low" if draft.get(key) else "high", *draft.given(key))
    once = "a weight is quantized once a step, and its scale found with it"
    for other in ("precompute_float8_dynamic_scale_for_fsdp", "force_recompute_fp8_weight_in_bwd"):
        draft.drop_given(NOT_NEEDED, once, f"{prefix}.{other}")
    if draft.get(f"{prefix}.emulate") is not None:
        draft.set("precision.emulate", draft.get(f"{prefix}.emulate"), f"{prefix}.emulate")
    _set_skip(draft, f"{prefix}.filter_fqns")


def _set_skip(draft: Draft, key: str) -> None:
    names = draft.names(key)
    unknown = [name for name in names if name not in _LAYERS]
    globs = [_LAYERS.get(name, f"*{name}*") for name in names]
    note = f"check the names of {', '.join(unknown)} with `lptune plan`" if unknown else ""
    draft.set("precision.skip", [glob for glob in globs if glob], *draft.given(key), note=note)
    if "auto_filter_small_kn" in names:
        draft.set(
            "precision.skip_small", True, key, note="by sizes and the number of tokens, not by sizes alone"
        )


def _set_validation(draft: Draft) -> None:
    section = draft.section("validation")
    if not section.get("enable"):
        draft.set("eval_every_steps", 0, *draft.given("validation.enable"))
        for key in sorted(set(section) - {"enable"}):
            draft.drop(f"validation.{key}", OFF, "validation.enable is false")
        return
    draft.set(
        "eval_every_steps", draft.integer("validation.freq", 10), "validation.enable", "validation.freq"
    )
    name = str(section.get("dataset", "c4_validation"))
    source, split = _DATASETS.get(name, ("FILL-IN.jsonl", ""))
    path = section.get("dataset_path")
    keys = draft.given("validation.dataset", "validation.dataset_path")
    draft.set("data.eval_source", path or source, *keys)
    if split and not path:
        draft.set("data.eval_split", split, *keys)
    if draft.value_of("data.eval_source") == "FILL-IN.jsonl":
        draft.ask("data.eval_source", f"validation.dataset {name} is a name inside torchtitan")
    if section.get("steps") is not None:
        draft.drop("validation.steps", BY_DESIGN, "all held-out rows are evaluated; name a file with fewer")
    for key in sorted(set(section) - {"enable", "freq", "dataset", "dataset_path", "steps"}):
        draft.drop(f"validation.{key}", NOT_NEEDED, "evaluation takes the sizes of training")


def _set_checkpoints(draft: Draft) -> None:
    on = draft.get("checkpoint.enable", draft.get("checkpoint.enable_checkpoint", False))
    switch = draft.given("checkpoint.enable", "checkpoint.enable_checkpoint")
    if not on:
        always = "a run always saves at its end, and every checkpoint.every_minutes=30"
        draft.drop_given(BY_DESIGN, always, *switch)
        others = ("checkpoint.interval", "checkpoint.keep_latest_k", "checkpoint.async_mode")
        draft.drop_given(OFF, "checkpoint.enable is false", *others)
        return
    draft.set("checkpoint.every_steps", draft.integer("checkpoint.interval", 500), *switch,
              *draft.given("checkpoint.interval"))  # fmt: skip
    keep = draft.integer("checkpoint.keep_latest_k", 10, 0)
    note = "" if keep else "0 keeps all there; keep_every=N keeps every Nth step here"
    draft.set("checkpoint.keep_last", keep or 10,
              *draft.given("checkpoint.keep_latest_k"), note=note)  # fmt: skip
    mode = draft.get("checkpoint.async_mode", "disabled")
    draft.set("checkpoint.async_save", mode not in ("disabled", "Disabled"),
              *draft.given("checkpoint.async_mode"))  # fmt: skip


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
_MOE = drop(NOT_NEEDED, "precision.kind is that of experts, too")
_WHOLE = drop(BY_DESIGN, "the last checkpoint is whole; OUTPUT_DIR/export holds the model")
_PIPELINE = drop(NOT_OFFERED, "there is no pipeline parallelism")
_CONTEXT = drop(NOT_NEEDED, "ranks exchange heads, in no turns")
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
    "expert_parallel_degree": drop(NOT_OFFERED, "see parallel.expert, which needs tensor and context of 1"),
    "expert_tensor_parallel_degree": drop(NOT_OFFERED, "each rank has whole experts"),
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
    "optimizer.early_step_in_backward": switch_on("optimizer.in_backward", IN_BACKWARD),
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
