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
    set_accumulated,
    set_defaults,
    to,
    walk,
)
from lptune.tools.migrate.entries import (
    Entry,
    keys_of,
    set_held_out_sources,
    set_sources,
    take,
    take_place,
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
from lptune.tools.migrate.trainer import RULES as TRAINER

_SHARED = (
    "tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree", "pipeline_parallel_size",
)  # fmt: skip


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
    defaults = {"data.seq_len": 512, "data.packing": False, "optimizer.beta2": 0.999, "seed": 42}
    set_defaults(draft, defaults)


def _check_kind(draft: Draft) -> None:
    adapter = draft.get("adapter")
    if adapter:
        raise refuse(draft, f"adapter: {adapter} trains adapters", "; there is no LoRA here")
    if draft.get("load_in_4bit") or draft.get("load_in_8bit") or draft.get("gptq"):
        raise refuse(draft, "loads weights in 4 or 8 bits, which only adapters train", "")
    if rl := draft.get("rl"):
        recipes = {**dict.fromkeys(("dpo", "ipo", "orpo", "simpo"), "full_dpo"), "kto": "full_kto"}
        recipe = recipes.get(str(rl))
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
        if draft.get(key) is None or key == "tensor_parallel_size":
            continue
        if (degree := draft.integer(key, 1)) <= 1:
            draft.drop(key, OFF, "")
        elif key == "pipeline_parallel_size":
            draft.drop(key, NOT_OFFERED, "there is no pipeline parallelism")
        else:
            draft.set("parallel.context", degree, key)
    set_accumulated(draft, "micro_batch_size", 1, shared)


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
    "message_field_role", "message_field_content", "message_property_mappings", "roles", "conversation",
    "field_human", "field_model",
)  # fmt: skip
_COLUMNS = {
    "field_messages": "messages_column", "field": "text_column", "text_column": "text_column",
    "field_system": "system_column", "field_instruction": "prompt_column", "field_input": "input_column",
    "field_output": "response_column", "split": "split",
}  # fmt: skip
_NOT_NEEDED = {
    **dict.fromkeys(_CHAT_KEYS, "role and content, and from and value, are recognised"),
    "ds_type": "the kind of a file is read from its name",
    "shards": "rows are read one by one",
    "trust_remote_code": "code of a data set is never run",
}
_BY_DESIGN = {
    **dict.fromkeys(
        ("roles_to_train", "train_on_eos", "train_on_eot", "message_field_training"),
        "the template's generation marks and weight: 0 of a message decide",
    ),
    "chat_template": "one template for all sources: data.chat_template",
}


def _fill_data(draft: Draft) -> None:
    """data.* from datasets or pretraining_dataset, test_datasets, val_set_size and train_on_inputs."""
    key = "pretraining_dataset" if draft.get("pretraining_dataset") is not None else "datasets"
    if key != "datasets":
        draft.drop_given(NOT_OFFERED, "pretraining_dataset is what is trained on", "datasets")
    if entries := _entries(draft, key):
        set_sources(draft, entries)
    else:
        ask_for_source(draft)
    if draft.get("train_on_inputs") is not None:
        draft.set("data.train_on_prompt", draft.get("train_on_inputs") is True, "train_on_inputs")
    set_held_out(draft, "val_set_size")
    set_held_out_sources(draft, _entries(draft, "test_datasets"))


def _entries(draft: Draft, key: str) -> list[Entry]:
    listed = draft.get(key, [])
    if isinstance(listed, (str, Mapping)):
        return [_entry(draft, key, listed)]
    if not isinstance(listed, list):
        raise draft.error(key, f"must be a list of data sets, found {listed!r:.60}")
    return [_entry(draft, f"{key}[{i}]", each) for i, each in enumerate(listed)]


def _entry(draft: Draft, key: str, value: Any) -> Entry:
    if isinstance(value, str):
        return {"source": (value, [key], "")}
    rest, found = keys_of(draft, key, value, "path"), Entry()
    note = _kind(draft, key, rest, found)
    place, keys = take_place(draft, key, rest, "path")
    if place is None:
        raise draft.error(key, "names no `path`")
    found = {"source": (place, keys, note), **found}
    take(rest, key, _COLUMNS, found)
    for name in rest:
        if name in _NOT_NEEDED:
            draft.drop(f"{key}.{name}", NOT_NEEDED, _NOT_NEEDED[name])
        elif name in _BY_DESIGN:
            draft.drop(f"{key}.{name}", BY_DESIGN, _BY_DESIGN[name])
        else:
            draft.drop(f"{key}.{name}", UNKNOWN)
    return found


def _kind(draft: Draft, key: str, rest: dict[str, Any], found: Entry) -> str:
    """Format and columns from `type`; returns what differs."""
    kind = rest.pop("type", None)
    name = str(kind).partition(".")[0].partition(":")[0] if isinstance(kind, str) else None
    if name in _FORMATS:
        form, note = _FORMATS[name]
        found["format"] = (form, [f"{key}.type"], "")
        return note
    if isinstance(kind, Mapping):
        found["format"] = ("pairs", [f"{key}.type"], "")
        for word, ours in {**_PAIRS, "system": "system_column"}.items():
            if column := kind.get(f"field_{word}"):
                found[ours] = (column, [f"{key}.type.field_{word}"], "")
        if kind.get("format"):
            draft.ask(
                "data.prompt_template", f"{key}.type.format: {kind['format']!r:.60}, with names of columns"
            )
        return PROMPTS
    if kind is not None:
        draft.drop(f"{key}.type", NOT_OFFERED, f"{kind}")
        draft.ask("data.format", f"{key}.type: {kind} is not known; pairs, chat or text, and the columns")
    return ""


def _unfrozen(draft: Draft, key: str, value: Any) -> None:
    draft.drop(key, BY_DESIGN, "freeze names what is not trained, this key names what is")
    draft.ask("freeze", f"the layers outside of {value!r:.50}")


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
_SPECIAL = drop(BY_DESIGN, "special tokens are those of the tokenizer in model.path; change them there")
_TOKENIZER = drop(NOT_NEEDED, "the tokenizer is read from model.path")
_LAUNCH = drop(NOT_NEEDED, "FSDP2 shards the model; ranks are a flag of `lptune run`")
_TRACKER = drop(NOT_NEEDED, "the tracker's own environment variables")
_KERNEL = drop(NOT_NEEDED, "compilation and the kernels here do this")
_ATTENTION = drop(NOT_NEEDED, "the attention backend is chosen by the device")
_PACKED = drop(NOT_NEEDED, "packing is planned before the first step")
_CACHED = drop(NOT_NEEDED, "tokenized once, into data.cache; rows are always shuffled")
_WATCHDOG = drop(BY_DESIGN, "diverged_after_steps ends a run whose loss is not finite")

RULES: Rules = {
    **TRAINER,
    "qat": int4_weights,
    "base_model": base_model,
    **each("model_type is_llama_derived_model", drop(NOT_NEEDED, "the family is read from config.json")),
    **each("base_model_config tokenizer_{type,config,use_fast,legacy}", _TOKENIZER),
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
    "sequence_len": integer_to("data.seq_len", "longer pairs and chats are cut; they are dropped there", 2),
    "excess_length_strategy": drop(BY_DESIGN, "documents are cut, and the report counts them"),
    "sample_packing": to("data.packing"),
    "eval_sample_packing": drop(BY_DESIGN, "held-out rows are packed as training rows are"),
    "eval_sequence_len": drop(BY_DESIGN, "held-out rows are as long as training rows"),
    "pad_to_sequence_len": drop(NOT_NEEDED, "rows always have data.seq_len tokens"),
    "group_by_length": if_on(NOT_OFFERED, "packing does away with padding"),
    **each("sample_packing_{eff_est,seq_len_multiplier} total_num_tokens", _PACKED),
    **each("special_tokens tokens added_tokens_overrides", _SPECIAL),
    "eot_tokens": drop(BY_DESIGN, "the template decides which tokens of an answer are learned"),
    "resize_token_embeddings_to_32x": drop(NOT_OFFERED, "the vocabulary stays that of the checkpoint"),
    "wandb_project": to("logging.wandb_project"),
    "trackio_project_name": to("logging.trackio_project"),
    "use_tensorboard": to("logging.tensorboard"),
    **each("wandb_{entity,watch,name,run_id,log_model} trackio_{run_name,space_id}", _TRACKER),
    "micro_batch_size": later,
    "batch_size": drop(NOT_NEEDED, "rows per step follow from micro_batch_size and accumulation"),
    "eval_batch_size": drop(NOT_NEEDED, "evaluation takes micro_batch_size"),
    "num_epochs": epochs,
    "optimizer": choice("optimizer.kind", OPTIMIZERS),
    "adam_eps": number_to("optimizer.eps"),
    **each("lr_scheduler cosine_{min,constant}_lr_ratio", later),
    # What has another name in axolotl.
    **each("model_name_or_path num_train_epochs optim lr_scheduler_{type,kwargs}", drop(UNKNOWN)),
    "per_device_train_batch_size": drop(UNKNOWN),
    **each("{evals,saves}_per_epoch", later),
    **each("bf16 bfloat16", bf16(_IN_BF16)),
    "float16": fp16,
    **each("fp8 fp8_enable_fsdp_float8_all_gather", later),
    **each("{flash,xformers,sdp,eager,s2}_attention flash_optimum", _ATTENTION),
    "flex_attn_compile_kwargs": _ATTENTION,
    **each("liger_{rope,rms_norm,glu_activation,layer_norm,cross_entropy}", _KERNEL),
    **each("liger_fused_linear_cross_entropy cut_cross_entropy use_kernels tiled_mlp plugins", _KERNEL),
    **each("flash_attn_{cross_entropy,rms_norm,fuse_mlp,fuse_qkv}", _KERNEL),
    "auto_resume_from_checkpoints": drop(NOT_NEEDED, "resume: auto is the default"),
    "eval_table_size": drop(NOT_OFFERED, "num_samples answers held-out prompts"),
    "early_stopping_patience": integer_to("early_stop_after", minimum=0),
    **each("loss_watchdog_{threshold,patience}", _WATCHDOG),
    "unfrozen_parameters": _unfrozen,
    "reinit_weights": reinit,
    **each("fsdp_version device_map", _LAUNCH),
    "dp_shard_size": drop(NOT_NEEDED, "the ranks that remain shard the model"),
    "dp_replicate_size": integer_to("parallel.replicate"),
    "tensor_parallel_size": integer_to("parallel.tensor"),
    **each("context_parallel_size sequence_parallel_degree pipeline_parallel_size", later),
    **each("torchdistx_path low_cpu_mem_usage experimental_skip_move_to_device", _LAUNCH),
}
