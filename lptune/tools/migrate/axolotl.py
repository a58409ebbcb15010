"""axolotl's YAML: flat keys, many of them those of transformers' Trainer.

Keys and defaults are those of axolotl at 067b021c8 (July 2026). A key that is there but empty counts as not
set, as in axolotl.
"""

from collections.abc import Mapping
from typing import Any

from lptune.tools.migrate.draft import (
    BY_DESIGN,
    NOT_NEEDED,
    NOT_OFFERED,
    OFF,
    PROMPTS,
    UNKNOWN,
    Draft,
    Rules,
    choice,
    drop,
    each,
    if_on,
    int4_weights,
    integer_to,
    later,
    number_to,
    refuse,
    set_batches,
    set_defaults,
    to,
    walk,
)
from lptune.tools.migrate.trainer import (
    OPTIMIZERS,
    SCHEDULES,
    ask_for_source,
    base_model,
    bf16,
    epochs,
    fp16,
    known_steps,
    reinit,
    set_float8,
    set_held_out,
    set_offload,
    set_recomputation,
    set_warmup,
)

_SHARED = (
    "tensor_parallel_size",
    "context_parallel_size",
    "sequence_parallel_degree",
    "pipeline_parallel_size",
)


def fill(draft: Draft) -> None:
    """Fills `draft` from an axolotl config. Raises UserError (one line) for adapters and preferences."""
    _check_kind(draft)
    walk(draft, RULES)
    if draft.get("pretraining_dataset") is not None:
        draft.recipe = "continued_pretrain"
    _fill_data(draft)
    _set_batches(draft)
    _set_schedule(draft)
    _set_per_epoch(draft)
    set_offload(draft)
    set_float8(draft)
    set_recomputation(draft)
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
    for key in ("diffusion", "processor_type"):
        if draft.get(key) is not None:
            what = {"diffusion": "trains a diffusion model"}
            raise refuse(draft, f"{key}: {what.get(key, 'reads images or sound')}", "")
    weights, tokens = draft.get("qat.weight_dtype"), draft.get("qat.activation_dtype")
    if draft.get("qat") is not None and (weights != "int4" or tokens is not None):
        instead = "; precision.kind=int4_weight has it, of weights in 4 bits alone"
        raise refuse(draft, "qat: is quantization-aware training", instead)


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


def _set_schedule(draft: Draft) -> None:
    name = str(draft.get("lr_scheduler", "cosine"))
    if name in SCHEDULES:
        draft.set("schedule.kind", SCHEDULES[name], *draft.given("lr_scheduler"))
    else:
        draft.drop("lr_scheduler", NOT_OFFERED, f"{name}: cosine, linear, constant and wsd are offered")
        draft.ask("schedule.kind", f"lr_scheduler: {name} is not offered")
    set_warmup(draft, name, ratio=0.03, limit=100)
    if name == "cosine":
        _set_minimum(draft)


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
    steps, epochs = known_steps(draft), draft.value_of("num_epochs", 1)
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


_PAIRS = {"instruction": "prompt_column", "input": "input_column", "output": "response_column"}
_ALPACA_NOTE = f"without the sentences of Alpaca around instruction and input; {PROMPTS}"
_FORMATS: dict[str, tuple[str, str]] = {
    "alpaca": ("pairs", _ALPACA_NOTE),
    "alpaca_chat": ("pairs", PROMPTS),
    "alpaca_w_system": ("pairs", _ALPACA_NOTE),
    "jeopardy": ("pairs", PROMPTS),
    "gpteacher": ("pairs", PROMPTS),
    "chat_template": ("chat", ""),
    "sharegpt": ("chat", ""),
    "completion": ("text", ""),
    "pretrain": ("text", ""),
}
"""First part of `type` -> format, what differs."""

_CHAT_KEYS = (
    "message_field_role",
    "message_field_content",
    "message_property_mappings",
    "roles",
    "conversation",
    "field_human",
    "field_model",
)
_NOT_NEEDED = {
    "ds_type": "the kind of a file is read from its name",
    "shards": "rows are read one by one",
    "trust_remote_code": "code of a data set is never run",
    "type": "",
}


def _fill_data(draft: Draft) -> None:
    """data.* from datasets or pretraining_dataset, test_datasets, val_set_size and train_on_inputs."""
    key = "pretraining_dataset" if draft.get("pretraining_dataset") is not None else "datasets"
    if key != "datasets" and draft.get("datasets") is not None:
        draft.drop("datasets", NOT_OFFERED, "pretraining_dataset is what is trained on")
    entries = _entries(draft, key)
    if not entries:
        ask_for_source(draft)
    elif len(entries) == 1:
        for ours, (value, theirs, note) in entries[0].items():
            draft.set(f"data.{ours}", value, *theirs, note=note)
    else:
        plain = [{ours: each[0] for ours, each in entry.items()} for entry in entries]
        notes = {each[2] for entry in entries for each in entry.values() if each[2]}
        names = [name for entry in entries for each in entry.values() for name in each[1]]
        draft.set("data.source", plain, *names, note="; ".join(sorted(notes)))
    if draft.get("train_on_inputs") is not None:
        draft.set("data.train_on_prompt", draft.get("train_on_inputs") is True, "train_on_inputs")
    _held_out(draft)


def _held_out(draft: Draft) -> None:
    set_held_out(draft, "val_set_size")
    tests = _entries(draft, "test_datasets")
    if len(tests) == 1:
        found = tests[0]
        draft.set("data.eval_source", found["source"][0], *found["source"][1], note=found["source"][2])
        if "split" in found:
            draft.set("data.eval_split", found["split"][0], *found["split"][1])
        others = [name for ours, each in found.items() if ours not in ("source", "split") for name in each[1]]
        for name in others:
            draft.drop(name, NOT_NEEDED, "columns and format of data hold for held-out data, too")
    elif tests:
        plain = [{ours: each[0] for ours, each in entry.items()} for entry in tests]
        draft.set(
            "data.eval_source",
            plain,
            *(name for entry in tests for each in entry.values() for name in each[1]),
        )


Entry = dict[str, tuple[Any, tuple[str, ...], str]]
"""Our key, below data -> value, keys of theirs, what differs."""


def _entries(draft: Draft, key: str) -> list[Entry]:
    listed = draft.get(key, [])
    if isinstance(listed, (str, Mapping)):
        listed = [listed]
    if not isinstance(listed, list):
        raise draft.error(key, f"must be a list of data sets, found {listed!r:.60}")
    return [
        _entry(draft, f"{key}[{i}]" if isinstance(draft.get(key), list) else key, each)
        for i, each in enumerate(listed)
    ]


def _entry(draft: Draft, key: str, value: Any) -> Entry:
    if isinstance(value, str):
        return {"source": (value, (key,), "")}
    if not isinstance(value, Mapping):
        raise draft.error(key, f"must be a section with `path`, found {value!r:.60}")
    rest = {str(name): each for name, each in value.items()}
    for name in [name for name, inner in rest.items() if inner is None]:
        draft.drop(f"{key}.{name}", OFF)
        del rest[name]
    found: Entry = {}
    note = _kind(draft, key, rest, found)
    path, keys = rest.pop("path", None), [f"{key}.path"]
    files = rest.pop("data_files", None)
    if path in ("json", "csv", "parquet", "text") and files is not None:
        path = files
        keys.append(f"{key}.data_files")
    elif files is not None:
        draft.drop(f"{key}.data_files", NOT_OFFERED, "files of a hub data set; download them and name them")
    if (config := rest.pop("name", None)) is not None:
        path = f"{path}:{config}"
        keys.append(f"{key}.name")
    if path is None:
        raise draft.error(key, "names no `path`")
    found = {"source": (path, tuple(keys), note), **found}
    if (split := rest.pop("split", None)) is not None:
        found["split"] = (split, (f"{key}.split",), "")
    _others(draft, key, rest, found)
    return found


def _kind(draft: Draft, key: str, rest: dict[str, Any], found: Entry) -> str:
    """Format and columns from `type`; returns what differs."""
    kind = rest.pop("type", None)
    name = str(kind).partition(".")[0].partition(":")[0] if isinstance(kind, str) else None
    if name in _FORMATS:
        form, note = _FORMATS[name]
        found["format"] = (form, (f"{key}.type",), "")
        return note
    if isinstance(kind, Mapping):
        found["format"] = ("pairs", (f"{key}.type",), "")
        for word, ours in {**_PAIRS, "system": "system_column"}.items():
            if column := kind.get(f"field_{word}"):
                found[ours] = (column, (f"{key}.type.field_{word}",), "")
        if kind.get("format"):
            draft.ask(
                "data.prompt_template", f"{key}.type.format: {kind['format']!r:.60}, with names of columns"
            )
        return PROMPTS
    if kind is not None:
        draft.drop(f"{key}.type", NOT_OFFERED, f"{kind}")
        draft.ask("data.format", f"{key}.type: {kind} is not known; pairs, chat or text, and the columns")
    return ""


def _others(draft: Draft, key: str, rest: dict[str, Any], found: Entry) -> None:
    columns = {"field_messages": "messages_column", "field": "text_column", "text_column": "text_column",
               "field_system": "system_column", "field_instruction": "prompt_column",
               "field_input": "input_column", "field_output": "response_column"}  # fmt: skip
    for name, value in rest.items():
        if name in columns:
            found[columns[name]] = (value, (f"{key}.{name}",), "")
        elif name in _CHAT_KEYS:
            draft.drop(f"{key}.{name}", NOT_NEEDED, "role and content, and from and value, are recognised")
        elif name in _NOT_NEEDED:
            draft.drop(f"{key}.{name}", NOT_NEEDED, _NOT_NEEDED[name])
        elif name == "chat_template":
            draft.drop(f"{key}.{name}", BY_DESIGN, "one template for all sources: data.chat_template")
        elif name in ("roles_to_train", "train_on_eos", "train_on_eot", "message_field_training"):
            draft.drop(
                f"{key}.{name}",
                BY_DESIGN,
                "the template's generation marks and weight: 0 of a message decide",
            )
        else:
            draft.drop(f"{key}.{name}", UNKNOWN)


def _unfrozen(draft: Draft, key: str, value: Any) -> None:
    draft.drop(key, BY_DESIGN, "freeze names what is not trained, this key names what is")
    draft.ask("freeze", f"the layers outside of {value!r:.50}")


def _special_tokens(draft: Draft, key: str, value: Any) -> None:
    draft.drop(key, BY_DESIGN, "special tokens are those of the tokenizer in model.path; change them there")


_TEMPLATES = {
    "chatml": "chatml", "gemma": "gemma", "gemma3": "gemma", "llama3": "llama3", "phi_3": "phi",
    "phi_35": "phi", "mistral_v7_tekken": "mistral",
}  # fmt: skip


def _template(draft: Draft, key: str, value: Any) -> None:
    if str(value).startswith("tokenizer_default"):
        draft.drop(key, NOT_NEEDED, "the tokenizer's template is the default")
        return
    if (name := _TEMPLATES.get(value)) is not None:
        draft.set("data.chat_template", name, key, note="without it the tokenizer's own")
        return
    draft.drop(key, BY_DESIGN, "not a name of data.chat_template; without it the tokenizer's own is used")
    draft.ask(
        "data.chat_template", f"a jinja file of the template {value}, if the tokenizer's own is another"
    )


_IN_BF16 = "weights are loaded in bf16 there; here the optimizer updates float32 weights"
_TOKENIZER = drop(NOT_NEEDED, "the tokenizer is read from model.path")
_LAUNCH = drop(NOT_NEEDED, "FSDP2 shards the model; ranks are a flag of `lptune run`")
_TRACKER = drop(NOT_NEEDED, "the tracker's own environment variables")
_KERNEL = drop(NOT_NEEDED, "compilation and the kernels here do this")
_ATTENTION = drop(NOT_NEEDED, "the attention backend is chosen by the device")
_PACKED = drop(NOT_NEEDED, "packing is planned before the first step")
_CACHED = drop(NOT_NEEDED, "tokenized once, into data.cache; rows are always shuffled")
_WATCHDOG = drop(BY_DESIGN, "diverged_after_steps ends a run whose loss is not finite")

RULES: Rules = {
    "qat": int4_weights,
    "base_model": base_model,
    **each("model_type is_llama_derived_model", drop(NOT_NEEDED, "the family is read from config.json")),
    **each("base_model_config tokenizer_{type,config,use_fast,legacy}", _TOKENIZER),
    "trust_remote_code": if_on(BY_DESIGN, "code of a checkpoint is never run"),
    "hub_model_id": drop(NOT_OFFERED, "upload OUTPUT_DIR/export with `hf upload`"),
    "hf_use_auth_token": drop(NOT_NEEDED, "HF_TOKEN"),
    **each("load_in_8bit load_in_4bit gptq strict debug adapter", drop(OFF)),
    "full_finetune": drop(NOT_NEEDED, "all weights are trained"),
    **each(
        "lora_{r,alpha,dropout,target_linear,target_modules,fan_in_fan_out,out_dir,model_dir}",
        drop(NOT_NEEDED, "no effect there without an adapter"),
    ),
    **each("datasets pretraining_dataset test_datasets val_set_size train_on_inputs", later),
    **each(
        "dataset_prepared_path push_dataset_to_hub shuffle_merged_datasets dataset_processes streaming "
        "skip_prepare_dataset remove_unused_columns streaming_multipack_buffer_size pretrain_multipack_attn "
        "pretrain_multipack_buffer_size dataset_exact_deduplication",
        _CACHED,
    ),
    "chat_template": _template,
    "chat_template_jinja": to("data.chat_template"),
    "default_system_message": to("data.system_prompt"),
    "output_dir": to("output_dir"),
    "sequence_len": integer_to("data.seq_len", "longer pairs and chats are cut; they are dropped there", 2),
    "excess_length_strategy": drop(BY_DESIGN, "documents are cut, and the report counts them"),
    "sample_packing": to("data.packing"),
    "eval_sample_packing": drop(BY_DESIGN, "held-out rows are packed as training rows are"),
    "eval_sequence_len": drop(BY_DESIGN, "held-out rows are as long as training rows"),
    "pad_to_sequence_len": drop(NOT_NEEDED, "rows always have data.seq_len tokens"),
    "group_by_length": if_on(NOT_OFFERED, "packing does away with padding"),
    **each("sample_packing_{eff_est,seq_len_multiplier} total_num_tokens", _PACKED),
    **each("special_tokens tokens added_tokens_overrides", _special_tokens),
    "eot_tokens": drop(BY_DESIGN, "the template decides which tokens of an answer are learned"),
    "resize_token_embeddings_to_32x": drop(NOT_OFFERED, "the vocabulary stays that of the checkpoint"),
    "wandb_project": to("logging.wandb_project"),
    "trackio_project_name": to("logging.trackio_project"),
    "use_tensorboard": to("logging.tensorboard"),
    **each("wandb_{entity,watch,name,run_id,log_model} trackio_{run_name,space_id}", _TRACKER),
    **each("gradient_accumulation_steps micro_batch_size", later),
    "batch_size": drop(NOT_NEEDED, "rows per step follow from micro_batch_size and accumulation"),
    "eval_batch_size": drop(NOT_NEEDED, "evaluation takes micro_batch_size"),
    "num_epochs": epochs,
    "max_steps": integer_to("num_steps"),
    "optimizer": choice("optimizer.kind", OPTIMIZERS),
    "learning_rate": number_to("optimizer.lr"),
    "weight_decay": number_to("optimizer.weight_decay"),
    "adam_beta1": number_to("optimizer.beta1"),
    "adam_beta2": number_to("optimizer.beta2"),
    **each("adam_{epsilon,eps}", number_to("optimizer.eps")),
    "max_grad_norm": number_to("max_grad_norm"),
    **each("lr_scheduler warmup_{ratio,steps} cosine_{min,constant}_lr_ratio", later),
    **each("{evals,saves}_per_epoch", later),
    **each("bf16 bfloat16", bf16(_IN_BF16)),
    **each("fp16 float16", fp16),
    "tf32": if_on(NOT_NEEDED, "what is not 8-bit or bfloat16 is float32"),
    **each("fp8 fp8_enable_fsdp_float8_all_gather gradient_checkpointing torch_compile fsdp_config", later),
    "gradient_checkpointing_kwargs": drop(NOT_NEEDED, "recomputation is never reentrant"),
    "activation_offloading": if_on(NOT_OFFERED, "activation_checkpointing=full takes least memory"),
    "torch_compile_backend": drop(NOT_NEEDED, "inductor"),
    **each("{flash,xformers,sdp,eager,s2}_attention attn_implementation flash_optimum", _ATTENTION),
    "flex_attn_compile_kwargs": _ATTENTION,
    **each("liger_{rope,rms_norm,glu_activation,layer_norm,cross_entropy}", _KERNEL),
    **each("liger_fused_linear_cross_entropy cut_cross_entropy use_kernels tiled_mlp plugins", _KERNEL),
    **each("flash_attn_{cross_entropy,rms_norm,fuse_mlp,fuse_qkv}", _KERNEL),
    "resume_from_checkpoint": drop(BY_DESIGN, "resume: auto continues output_dir; axolotl's are not read"),
    "auto_resume_from_checkpoints": drop(NOT_NEEDED, "resume: auto is the default"),
    "logging_steps": drop(NOT_NEEDED, "every step is in metrics.jsonl"),
    "eval_steps": integer_to("eval_every_steps"),
    "save_steps": integer_to("checkpoint.every_steps"),
    "save_total_limit": integer_to("checkpoint.keep_last"),
    "save_strategy": drop(BY_DESIGN, "checkpoint.every_steps, every_minutes and at_end decide"),
    **each("eval_strategy evaluation_strategy", drop(BY_DESIGN, "eval_every_steps decides")),
    "eval_table_size": drop(NOT_OFFERED, "num_samples answers held-out prompts"),
    "save_only_model": drop(BY_DESIGN, "a checkpoint is whole; OUTPUT_DIR/export holds the model"),
    "save_safetensors": drop(NOT_NEEDED, "always"),
    "early_stopping_patience": integer_to("early_stop_after", minimum=0),
    **each("loss_watchdog_{threshold,patience}", _WATCHDOG),
    "unfrozen_parameters": _unfrozen,
    "reinit_weights": reinit,
    "neftune_noise_alpha": drop(NOT_OFFERED, "no noise on embeddings"),
    "seed": integer_to("seed", minimum=0),
    **each("deepspeed fsdp fsdp_version", _LAUNCH),
    "dp_shard_size": drop(NOT_NEEDED, "the ranks that remain shard the model"),
    "dp_replicate_size": integer_to("parallel.replicate"),
    "tensor_parallel_size": integer_to("parallel.tensor"),
    **each("context_parallel_size sequence_parallel_degree pipeline_parallel_size", later),
    **each("ddp_{timeout,find_unused_parameters,bucket_cap_mb} local_rank device_map", _LAUNCH),
    **each("torchdistx_path low_cpu_mem_usage accelerator_config experimental_skip_move_to_device", _LAUNCH),
}
