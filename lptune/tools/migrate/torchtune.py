"""torchtune's YAML: `_component_` names an object with its arguments, `${output_dir}` another key.

Keys, defaults and dataset builders are those of torchtune 0.7 at bd2a0fc7c (April 2026), recipes
full_finetune_single_device and full_finetune_distributed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    OTHER_BITS,
    PAGED,
    PROMPTS,
    UNKNOWN,
    WARMUP,
    Draft,
    Rules,
    choice,
    drop,
    each,
    if_on,
    int4_weights,
    integer_to,
    later,
    leaves,
    number_to,
    refuse,
    set_accumulated,
    set_defaults,
    switch_on,
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

_MAX_REFERENCES = 32


def fill(draft: Draft) -> None:
    """Fills `draft` from a torchtune config. Raises UserError (one line) for LoRA, DPO and others."""
    draft.values = _resolved(draft, draft.values)
    _check_kind(draft)
    walk(draft, RULES, ("clip_grad_norm", "seed", "run_val_every_n_steps", "tokenizer.max_seq_len"))
    _fill_data(draft)
    shared = draft.integer("tensor_parallel_dim", 1) * draft.integer("context_parallel_dim", 1)
    set_accumulated(draft, "batch_size", 1, shared)
    _set_float8(draft)
    _set_activations(draft)
    if draft.get("lr_scheduler") is None:
        draft.set("schedule.kind", "constant")
    set_defaults(
        draft,
        {
            "max_grad_norm": 0.0,
            "optimizer.weight_decay": _default_decay(draft),
            "optimizer.beta2": 0.999,
            "compile": "none",
            "eval_every_steps": 0,
        },
    )
    _fill_in(draft)


def _default_decay(draft: Draft) -> float:
    """torch's and bitsandbytes' Adam has no decay unless it is asked for; their AdamW has 0.01."""
    return 0.0 if str(draft.get("optimizer._component_")).lower().endswith(".adam") else 0.01


def _check_kind(draft: Draft) -> None:
    model = str(draft.get("model._component_", ""))
    if re.search(r"\b(q?lora|dora)_", model) or draft.get("model.lora_rank") is not None:
        raise refuse(draft, f"{model} trains adapters (LoRA)", "; there is no LoRA here")
    loss = str(draft.get("loss._component_", ""))
    if re.search(r"dpo|rlhf|grpo|ppo|\brl\b", loss.lower()):
        where = "; see the recipe full_dpo (docs/preferences.md)"
        raise refuse(draft, f"{loss} is a loss of preferences or rewards", where)
    if draft.get("teacher_model") is not None:
        raise refuse(draft, "a teacher_model is distilled", "; see the recipe distill (docs/distillation.md)")
    quantizer = str(draft.get("quantizer._component_", ""))
    if draft.get("quantizer") is not None and "Int4WeightOnlyQAT" not in quantizer:
        raise refuse(
            draft,
            f"quantizer: {quantizer.rpartition('.')[2]} is quantization-aware training (QAT)",
            "; precision.kind=int4_weight has it, of weights in 4 bits alone",
        )
    for missing in ("model", "optimizer"):
        if not draft.section(missing):
            raise refuse(draft, f"is no training config (it has no `{missing}`)", "")


def _resolved(draft: Draft, value: Any) -> Any:
    """`value` with `${key}` replaced by the value of that key; `${oc.env:…}` stays, unread."""
    if isinstance(value, Mapping):
        return {str(name): _resolved(draft, each) for name, each in value.items()}
    if isinstance(value, list):
        return [_resolved(draft, each) for each in value]
    for _ in range(_MAX_REFERENCES):
        found = re.search(r"\$\{([A-Za-z_][\w.]*)\}", value) if isinstance(value, str) else None
        if found is None:
            return value
        target = draft.get(found[1])
        is_text = target is not None and not isinstance(target, Mapping | list)
        if not is_text and (found[0] != value or found[1] not in leaves(draft.values)):
            raise draft.error(found[0], "refers to a key that the file does not have")
        if found[0] == value:
            value = target
        else:
            value = value[: found.start()] + str(target) + value[found.end() :]
        if isinstance(value, str) and len(value) > 4096:
            break
    raise draft.error(str(value)[:60], "its ${…} refer to each other without an end")


def _set_float8(draft: Draft) -> None:
    keys = [key for key in ("enable_fp8_training", "fp8_recipe_name") if key in draft.values]
    if draft.get("enable_fp8_training") is not True:
        draft.drop_given(OFF, "", *keys)
        return
    name = draft.get("fp8_recipe_name")
    kinds = {None: "float8_tensorwise", "tensorwise": "float8_tensorwise", "rowwise": "float8_rowwise",
             "rowwise_with_gw_hp": "float8_rowwise_with_gw_hp"}  # fmt: skip
    if name not in kinds:
        draft.drop("fp8_recipe_name", NOT_OFFERED, str(name))
        draft.ask("precision.kind", f"fp8_recipe_name: {name} is not offered")
        return
    draft.set("precision.kind", kinds[name], *keys)
    draft.set("precision.all_gather", "low" if name is None else "high", *keys)


def _set_activations(draft: Draft) -> None:
    keys = [key for key in ("enable_activation_checkpointing", "ac_mode", "ac_option") if key in draft.values]
    mode = draft.get("ac_mode")
    on = draft.get("enable_activation_checkpointing", False)
    if mode == "selective":
        note = "every block keeps its GEMM and attention outputs; there every n-th block is recomputed whole"
        draft.set("activation_checkpointing", "selective", *keys, note=note)
    else:
        draft.set("activation_checkpointing", "full" if on or mode == "full" else "none", *keys)


def _fill_in(draft: Draft) -> None:
    if draft.get("tokenizer.max_seq_len") is None:
        draft.ask("data.seq_len", NO_LIMIT)
    if draft.value_of("model.path") is None:
        draft.set("model.path", "FILL-IN")
        draft.ask("model.path", "the folder of a Hugging Face checkpoint")


@dataclass(frozen=True)
class Builder:
    """What a builder reads if its arguments do not say otherwise."""

    format: str
    source: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    """The builder's word for a column -> our key."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The builder's word for a column -> the column, if column_map does not say it."""
    trains_on_prompt: bool = False
    text: str = PROMPTS


_PAIRS = {"input": "prompt_column", "output": "response_column"}
_ALPACA = Builder(
    "pairs",
    "tatsu-lab/alpaca",
    {"instruction": "prompt_column", "input": "input_column", "output": "response_column"},
    {"instruction": "instruction", "input": "input", "output": "output"},
    trains_on_prompt=True,
    text=f"without the sentences of Alpaca around instruction and input; {PROMPTS}",
)
BUILDERS = {
    "alpaca_dataset": _ALPACA,
    "alpaca_cleaned_dataset": Builder(
        "pairs", "yahma/alpaca-cleaned", _ALPACA.columns, _ALPACA.names, True, _ALPACA.text
    ),
    "instruct_dataset": Builder("pairs", None, _PAIRS, {"input": "input", "output": "output"}),
    "grammar_dataset": Builder("pairs", "liweili/c4_200m", _PAIRS, {"input": "input", "output": "output"}),
    "samsum_dataset": Builder("pairs", "Samsung/samsum", _PAIRS, {"input": "dialogue", "output": "summary"}),
    "chat_dataset": Builder("chat"),
    "slimorca_dataset": Builder("chat", "Open-Orca/SlimOrca-Dedup", names={"messages": "conversations"}),
    "text_completion_dataset": Builder("text", text=""),
    "wikitext_dataset": Builder("text", "EleutherAI/wikitext_document_level", text=""),
    "cnn_dailymail_articles_dataset": Builder(
        "text", "ccdv/cnn_dailymail", names={"text": "article"}, text=""
    ),
}
_NOT_NEEDED = {
    "conversation_style": "both styles of chats are recognised",
    "split_across_pack": "documents are not cut to fill a row; long texts are cut into chunks",
    "add_eos": "a text ends with the end token",
}


def _fill_data(draft: Draft) -> None:
    """data.source and its keys from `dataset`, data.eval_source from `dataset_val`."""
    dataset = draft.get("dataset")
    listed = dataset if isinstance(dataset, list) else [] if dataset is None else [dataset]
    found = [_entry(draft, f"dataset[{i}]" if dataset is listed else "dataset", each)
             for i, each in enumerate(listed)]  # fmt: skip
    entries = [each for each in found if each is not None]
    if not entries or len(entries) < len(found):
        draft.set("data.source", "FILL-IN.jsonl")
        draft.ask("data.source", "a file, a folder, a glob or a hub data set")
    else:
        if len(entries) > 1:
            _set_keys_of_all(draft, entries)
        set_sources(draft, entries)
    if draft.value_of("data.packing") is None:
        draft.set("data.packing", False)
    if draft.get("dataset_val") is not None:
        held_out = _entry(draft, "dataset_val", draft.get("dataset_val"))
        if held_out is None:
            draft.ask("data.eval_source", "held-out data")
        else:
            set_held_out_sources(draft, [held_out])


def _set_keys_of_all(draft: Draft, entries: list[Entry]) -> None:
    """Takes out of the entries the keys that hold for all sources here, and sets them where the data sets,
    each of which has its own there, agree.
    """
    for ours in ("train_on_prompt", "packing"):
        # A text has no prompt, so it has no opinion.
        asked = [entry for entry in entries if ours != "train_on_prompt" or entry["format"][0] != "text"]
        values = {entry[ours][0] if ours in entry else False for entry in asked}
        taken = [entry.pop(ours) for entry in entries if ours in entry]
        keys = [key for each in taken for key in each[1]]
        if len(values) > 1:
            text = "is one for all sources, and these data sets differ"
            draft.set(f"data.{ours}", False, *keys, note=f"data.{ours} {text}")
            draft.ask(f"data.{ours}", f"true or false: it {text}")
        elif taken:
            draft.set(f"data.{ours}", values.pop(), *keys, note=taken[0][2])


def _entry(draft: Draft, key: str, value: Any) -> Entry | None:
    """The `Entry` of one dataset; None if its builder is not known."""
    rest = keys_of(draft, key, value, "_component_")
    name = str(rest.pop("_component_", "")).rpartition(".")[2]
    builder = BUILDERS.get(name)
    if builder is None:
        draft.drop(key, NOT_OFFERED, f"{name or 'a dataset without _component_'} is not known")
        return None
    component = f"{key}._component_"
    place, keys = take_place(draft, key, rest, "source", builder.source)
    if place is None:
        draft.ask("data.source", f"{key} names no source")
    found: Entry = {
        "source": (place or "FILL-IN.jsonl", keys or [component], builder.text),
        "format": (builder.format, [component], ""),
    }
    take(rest, key, {"split": "split"}, found)
    _columns(draft, key, builder, rest, found)
    prompt = rest.pop("train_on_input", None)
    if builder.format != "text" and bool(prompt if prompt is not None else builder.trains_on_prompt):
        origin = f"{key}.train_on_input" if prompt is not None else component
        found["train_on_prompt"] = (True, [origin], "")
    elif prompt is not None:
        draft.drop(f"{key}.train_on_input", OFF)
    if "packed" in rest:
        note = (
            "a document in each row, padded to data.seq_len here and to the longest of a batch there; with "
            "data.packing=true a step holds more documents and little padding"
        )
        on = rest.pop("packed") is True
        found["packing"] = (on, [f"{key}.packed"], "" if on else note)
    take(rest, key, {"new_system_prompt": "system_prompt"}, found)
    for name in rest:
        if name in _NOT_NEEDED:
            draft.drop(f"{key}.{name}", NOT_NEEDED, _NOT_NEEDED[name])
        else:
            draft.drop(f"{key}.{name}", UNKNOWN)
    return found


def _columns(draft: Draft, key: str, builder: Builder, rest: dict[str, Any], found: Entry) -> None:
    component, names = f"{key}._component_", builder.names
    for word, column in (rest.pop("column_map", None) or {}).items():
        ours = builder.columns.get(word)
        if ours is None:
            draft.drop(f"{key}.column_map.{word}", UNKNOWN)
        else:
            found[ours] = (column, [f"{key}.column_map.{word}"], "")
    for word, ours in builder.columns.items():
        if word in names and names[word] != word and ours not in found:
            found[ours] = (names[word], [component], "")
    for word, ours in {"messages": "messages_column", "text": "text_column"}.items():
        if word in names:
            found[ours] = (names[word], [component], "")
    take(rest, key, {"column": "text_column", "conversation_column": "messages_column"}, found)


NO_LIMIT = "no limit there; 2048 here, and `lptune data` counts what is cut off"
_OTHER_MODELS = ("vision", "llama4", "flux", "clip", "t5", "deepseek", "gemma.", "llama3_2_vision")

_OPTIMIZERS = {
    "torch.optim.adamw": ("adamw", ""),
    "torch.optim.adam": ("adamw", ADAM),
    "bitsandbytes.optim.adamw": ("adamw", ""),
    "bitsandbytes.optim.pagedadamw": ("adamw", PAGED),
    "bitsandbytes.optim.adamw8bit": ("adamw_8bit", ""),
    "bitsandbytes.optim.pagedadamw8bit": ("adamw_8bit", PAGED),
    "torchao.optim.adamw8bit": ("adamw_8bit", ""),
    "torchao.optim.adamwfp8": ("adamw_8bit", OTHER_BITS),
    "torchao.prototype.low_bit_optim.adamw8bit": ("adamw_8bit", ""),
}
_LOSSES = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss")


def _model(draft: Draft, key: str, value: Any) -> None:
    name = str(draft.get("model._component_", ""))
    draft.drop("model._component_", NOT_NEEDED, "the model is described by config.json in model.path")
    if any(part in name for part in _OTHER_MODELS):
        draft.ask("model.path", f"{name} is of no family that lptune trains (docs/models.md)")
    for other in sorted(set(draft.section(key)) - {"_component_"}):
        draft.drop(f"model.{other}", NOT_OFFERED, "arguments of a model builder")


def _component(draft: Draft, key: str, value: Any) -> None:
    """checkpointer._component_"""
    if "HF" in str(value):
        draft.drop(key, NOT_NEEDED, "safetensors of Hugging Face are read and written")
    else:
        draft.drop(key, NOT_OFFERED, "only Hugging Face folders are read")
        draft.ask("model.path", f"a Hugging Face folder of the same model: {value} reads another format")


def _checkpoint_files(draft: Draft, key: str, value: Any) -> None:
    draft.drop(key, NOT_NEEDED, "read from the checkpoint's index")
    if ".bin" in str(value) or ".pt" in str(value):
        draft.ask("model.path", "the files are pickles; lptune reads safetensors only: download these")


def _checkpointer_output(draft: Draft, key: str, value: Any) -> None:
    if str(value).rstrip("/") == str(draft.get("output_dir", "")).rstrip("/"):
        draft.drop(key, NOT_NEEDED, "everything of a run is in output_dir")
    else:
        draft.drop(key, BY_DESIGN, f"checkpoints are in output_dir, not in {value}")


def _max_seq_len(draft: Draft, key: str, value: Any) -> None:
    if value is None:
        draft.drop(
            key, BY_DESIGN, "rows are cut at data.seq_len here; torchtune pads to the longest of a batch"
        )
    else:
        draft.set("data.seq_len", draft.integer(key, 1, 2), key)


def _seed(draft: Draft, key: str, value: Any) -> None:
    if value is None:
        draft.drop(key, BY_DESIGN, "a random seed there, seed 0 here, so that a run can be repeated")
    else:
        draft.set("seed", draft.integer(key, 0, 0), key)


def _evaluate_every(draft: Draft, key: str, value: Any) -> None:
    if value is None:
        draft.set("eval_every_steps", 0, key)
    else:
        note = "steps are optimizer steps; also before the first and after the last one"
        draft.set("eval_every_steps", draft.integer(key, 1), key, note=note)


def _steps_per_epoch(draft: Draft, key: str, value: Any) -> None:
    steps = draft.integer(key, 1) * draft.integer("epochs", 1)
    draft.set(
        "num_steps", steps, key, "epochs", note="steps of the whole run; shorter epochs are not known here"
    )


def _betas(draft: Draft, key: str, value: Any) -> None:
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(isinstance(beta, float | int) for beta in value):
        raise draft.error(key, f"must be a list of two numbers, found {value!r:.60}")
    for number, beta in enumerate(value, 1):
        draft.set(f"optimizer.beta{number}", float(beta), key)


def _compile(draft: Draft, key: str, value: Any) -> None:
    parts = draft.section(key) if isinstance(value, Mapping) else {"model": value}
    keys = [f"{key}.{name}" for name in parts] if isinstance(value, Mapping) else [key]
    draft.set("compile", "block" if parts.get("model", True) is True else "none", *keys)


def _logger(draft: Draft, key: str, value: Any) -> None:
    value = draft.section(key)
    name = str(value.get("_component_", "")).rpartition(".")[2]
    component = f"{key}._component_"
    others = [f"{key}.{each}" for each in value if each not in ("_component_", "project")]
    if name == "TensorBoardLogger":
        draft.set("logging.tensorboard", True, component)
    elif name == "WandBLogger":
        draft.set("logging.wandb_project", value.get("project", "torchtune"), component, f"{key}.project")
    elif name in ("DiskLogger", "StdoutLogger"):
        draft.drop(component, NOT_NEEDED, "every step is in OUTPUT_DIR/metrics.jsonl")
    else:
        draft.drop(component, NOT_OFFERED, f"{name}: trackers are TensorBoard, W&B and trackio")
    if "project" in value and name != "WandBLogger":
        others.append(f"{key}.project")
    for other in others:
        draft.drop(other, NOT_NEEDED, "what a run writes is in output_dir")


def _profiler(draft: Draft, key: str, value: Any) -> None:
    off = not draft.section(key).get("enabled", False)
    draft.drop(key, OFF if off else NOT_OFFERED, "" if off else "use torch.profiler in a copy of the recipe")


def _loss(draft: Draft, key: str, value: Any) -> None:
    name = str(value).rpartition(".")[2]
    if name in _LOSSES:
        draft.drop(
            key,
            NOT_NEEDED,
            "the recipe computes this cross-entropy, in chunks, without the logits of all tokens",
        )
    else:
        draft.drop(key, NOT_OFFERED, f"{name}: another loss is a copy of the recipe (`lptune cp`)")


def _scheduler(draft: Draft, key: str, value: Any) -> None:
    value = draft.section(key)
    name = str(value.get("_component_", "")).rpartition(".")[2]
    if name == "get_cosine_schedule_with_warmup":
        note = "" if value.get("num_cycles", 0.5) == 0.5 else "one half wave here; num_cycles is not offered"
        draft.set("schedule.kind", "cosine", f"{key}._component_", note=note)
    else:
        draft.drop(f"{key}._component_", NOT_OFFERED, f"{name}: cosine, linear, constant and wsd are offered")
        draft.ask("schedule.kind", f"{name} is not offered")
    if value.get("num_warmup_steps") is not None:
        steps = f"{key}.num_warmup_steps"
        draft.set("schedule.warmup_steps", draft.integer(steps, 0, 0), steps, note=WARMUP)
    for other in sorted(set(value) - {"_component_", "num_warmup_steps"}):
        draft.drop(f"{key}.{other}", NOT_OFFERED)


RULES: Rules = {
    "quantizer": int4_weights,
    "output_dir": to("output_dir"),
    "model": _model,
    "seed": _seed,
    "shuffle": drop(NOT_NEEDED, "documents are always shuffled, by seed and epoch"),
    **each("dataset dataset_val batch_size gradient_accumulation_steps", later),
    **each("enable_activation_checkpointing ac_mode ac_option enable_fp8_training fp8_recipe_name", later),
    "batch_size_val": drop(NOT_NEEDED, "evaluation takes micro_batch_size"),
    "collate_fn": drop(NOT_NEEDED, "rows are packed or padded as data.packing says"),
    "run_val_every_n_steps": _evaluate_every,
    "tokenizer.max_seq_len": _max_seq_len,
    "tokenizer.prompt_template": drop(
        BY_DESIGN, "the tokenizer's template writes chats, or data.chat_template"
    ),
    **each(
        "tokenizer.{_component_,path,merges_file,vocab_path,merges_path,special_tokens,special_tokens_path} "
        "tokenizer.{tokenizer_json_path,tokenizer_config_json_path}",
        drop(NOT_NEEDED, "the tokenizer is read from model.path"),
    ),
    "checkpointer._component_": _component,
    "checkpointer.checkpoint_dir": to("model.path"),
    "checkpointer.checkpoint_files": _checkpoint_files,
    "checkpointer.output_dir": _checkpointer_output,
    "checkpointer.keep_last_n_checkpoints": integer_to("checkpoint.keep_last"),
    "checkpointer.model_type": drop(NOT_NEEDED, "the family is read from config.json"),
    "checkpointer.recipe_checkpoint": drop(NOT_NEEDED, "a run continues by itself (resume)"),
    "checkpointer.safe_serialization": drop(NOT_NEEDED, "an export is always safetensors"),
    "resume_from_checkpoint": drop(BY_DESIGN, "resume: auto, the default, continues what output_dir holds"),
    "save_every_n_steps": integer_to("checkpoint.every_steps"),
    "enable_async_checkpointing": to("checkpoint.async_save"),
    "epochs": integer_to("num_epochs"),
    "max_steps_per_epoch": _steps_per_epoch,
    "optimizer._component_": choice("optimizer.kind", _OPTIMIZERS),
    "optimizer.lr": number_to("optimizer.lr"),
    "optimizer.eps": number_to("optimizer.eps"),
    "optimizer.betas": _betas,
    "optimizer.weight_decay": number_to("optimizer.weight_decay", DECAY),
    **each("optimizer.{fused,foreach}", drop(NOT_NEEDED, "fused where the device has it")),
    "optimizer_in_bwd": switch_on("optimizer.in_backward", IN_BACKWARD),
    "lr_scheduler": _scheduler,
    "loss._component_": _loss,
    "loss.num_output_chunks": drop(NOT_NEEDED, "the size of a chunk is chosen by itself"),
    "clip_grad_norm": number_to("max_grad_norm"),
    "compile": _compile,
    "device": to("device"),
    "dtype": choice("compute_dtype", {"bf16": ("bfloat16", MASTER), "fp32": ("float32", "")}),
    "enable_activation_offloading": if_on(NOT_OFFERED, "activation_checkpointing=full takes least memory"),
    **each(
        "custom_sharded_layers memory_efficient_fsdp_wrap",
        drop(NOT_NEEDED, "embedding and head are sharded on their own"),
    ),
    "fsdp_cpu_offload": to("parallel.cpu_offload"),
    "fsdp_reshard_after_forward": to("parallel.reshard_after_forward"),
    "tensor_parallel_dim": integer_to("parallel.tensor"),
    "tensor_parallel_plan": drop(NOT_NEEDED, "each family has its plan"),
    "data_parallel_replicate_dim": integer_to("parallel.replicate"),
    "data_parallel_shard_dim": drop(NOT_NEEDED, "the ranks that remain shard the model"),
    "context_parallel_dim": to("parallel.context"),
    "context_parallel_rotate_method": drop(NOT_NEEDED, "ranks exchange heads, in no turns"),
    "cudnn_deterministic_mode": drop(BY_DESIGN, "deterministic: true makes a run on CUDA repeatable"),
    "resize_token_embeddings": if_on(NOT_OFFERED, "the vocabulary stays that of the checkpoint"),
    "metric_logger": _logger,
    "log_every_n_steps": drop(NOT_NEEDED, "every step is in metrics.jsonl"),
    "log_peak_memory_stats": drop(NOT_NEEDED, "peak_memory_gib is in every row of metrics.jsonl"),
    "log_level": drop(NOT_NEEDED, "a run prints what it does"),
    "profile_memory": if_on(NOT_OFFERED, "use torch's memory snapshot in a copy of the recipe"),
    "profiler": _profiler,
}
