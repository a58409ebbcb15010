"""The keys of torchtune whose meaning does not depend on others, and the table of all keys."""

from collections.abc import Mapping
from typing import Any

from lptune.tools.migrate.common import DECAY, EIGHT_BIT, MASTER, PAGED, WARMUP
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

NO_LIMIT = "no limit there; 2048 here, and `lptune data` counts what is cut off"
_OTHER_MODELS = ("vision", "llama4", "flux", "clip", "t5", "deepseek", "gemma.", "llama3_2_vision")

_OPTIMIZERS = {
    "torch.optim.adamw": ("adamw", ""),
    "torch.optim.adam": ("adamw", "Adam adds the decay to the gradient; AdamW does not"),
    "bitsandbytes.optim.adamw": ("adamw", ""),
    "bitsandbytes.optim.pagedadamw": ("adamw", PAGED),
    "bitsandbytes.optim.adamw8bit": ("adamw", EIGHT_BIT),
    "bitsandbytes.optim.pagedadamw8bit": ("adamw", f"{EIGHT_BIT}; {PAGED}"),
    "torchao.optim.adamw8bit": ("adamw", EIGHT_BIT),
    "torchao.optim.adamwfp8": ("adamw", EIGHT_BIT),
    "torchao.prototype.low_bit_optim.adamw8bit": ("adamw", EIGHT_BIT),
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
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(isinstance(beta, float | int) for beta in value)
    ):
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
    "optimizer_in_bwd": if_on(NOT_OFFERED, "parallel.reduce_every_micro_batch keeps fewer gradients"),
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
    "context_parallel_rotate_method": drop(NOT_OFFERED, "there is no context parallelism"),
    "cudnn_deterministic_mode": drop(BY_DESIGN, "deterministic: true makes a run on CUDA repeatable"),
    "resize_token_embeddings": if_on(NOT_OFFERED, "the vocabulary stays that of the checkpoint"),
    "metric_logger": _logger,
    "log_every_n_steps": drop(NOT_NEEDED, "every step is in metrics.jsonl"),
    "log_peak_memory_stats": drop(NOT_NEEDED, "peak_memory_gib is in every row of metrics.jsonl"),
    "log_level": drop(NOT_NEEDED, "a run prints what it does"),
    "profile_memory": if_on(NOT_OFFERED, "use torch's memory snapshot in a copy of the recipe"),
    "profiler": _profiler,
}
