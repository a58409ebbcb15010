"""What keys and values of other trainers are called here: torchtune's, transformers', torchtitan's.

The key with the most similar spelling is not always the right one: `dtype` is not `export.dtype`, `fp8` is
not `mxfp8`, `gpu` is not `cpu`. So an error message looks here first, and only then for a similar spelling.
"""

from collections.abc import Collection

_BATCH = "micro_batch_size (rows per forward and rank) and global_batch_size (rows per step, over all ranks)"
_DTYPE = "compute_dtype (master weights are float32); INT8 and float8 are precision.kind"
_CODE = (
    "there is none: a config names no code; `lptune cp full_finetune mine.py` gives you a recipe to change"
)
_LENGTH = "data.seq_len"
_LAUNCH = "a flag: lptune run --nproc-per-node N RECIPE …"

KEYS = {
    "_component_": _CODE,
    "attn_implementation": "there is none: the device decides, and the run prints which it is",
    "batch_size": _BATCH,
    "per_device_train_batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "local_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "there is none: micro_batch_size, global_batch_size and ranks decide it",
    "epochs": "num_epochs",
    "max_epochs": "num_epochs",
    "num_train_epochs": "num_epochs",
    "max_steps": "num_steps",
    "max_steps_per_epoch": "num_steps (of the whole run)",
    "total_steps": "num_steps",
    "learning_rate": "optimizer.lr",
    "val_size": "data.eval_fraction",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule.kind",
    "num_warmup_steps": "schedule.warmup_steps",
    "warmup_ratio": "schedule.warmup_steps",
    "clip_grad_norm": "max_grad_norm",
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "mixed_precision": _DTYPE,
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "fp8": "precision.kind (float8_tensorwise, float8_rowwise, …)",
    "int8": "precision.kind (int8_rowcol, …)",
    "quantization": "precision.kind",
    "quantizer": "precision.kind",
    "enable_activation_checkpointing": "activation_checkpointing",
    "enable_activation_offloading": "there is none; activation_checkpointing=full takes the least memory",
    "gradient_checkpointing": "activation_checkpointing",
    "optimizer_in_bwd": "optimizer.in_backward",
    "checkpointer": "model.path for the model, checkpoint for the run's own checkpoints, resume to continue",
    "checkpoint_dir": "model.path",
    "output": "output_dir",
    "model_name_or_path": "model.path",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "enable_async_checkpointing": "checkpoint.async_save",
    "resume_from_checkpoint": "resume",
    "eval_steps": "eval_every_steps",
    "run_val_every_n_steps": "eval_every_steps",
    "log_every_n_steps": "there is none: every step is in metrics.jsonl",
    "logging_steps": "there is none: every step is in metrics.jsonl",
    "metric_logger": "logging",
    "report_to": "logging",
    "dataset": "data (data.source, data.packing, …)",
    "dataset_val": "data.eval_source",
    "data_files": "data.source",
    "data.path": "data.source",
    "train_file": "data.source",
    "tokenizer": f"there is none: it is read from model.path; its max_seq_len is {_LENGTH}",
    "max_length": _LENGTH,
    "max_seq_len": _LENGTH,
    "max_seq_length": _LENGTH,
    "block_size": _LENGTH,
    "packed": "data.packing",
    "train_on_input": "data.train_on_prompt",
    "train_on_inputs": "data.train_on_prompt",
    "shuffle": "there is none: rows are always shuffled, by seed and epoch",
    "fsdp_cpu_offload": "parallel.cpu_offload",
    "fsdp_reshard_after_forward": "parallel.reshard_after_forward",
    "tensor_parallel_dim": "parallel.tensor",
    "tensor_parallel_degree": "parallel.tensor",
    "data_parallel_replicate_dim": "parallel.replicate",
    "data_parallel_replicate_degree": "parallel.replicate",
    "nproc_per_node": _LAUNCH,
    "nnodes": _LAUNCH.replace("nproc-per-node", "nnodes"),
}
"""Another trainer's key, or the last part of it -> what it is here."""

_COMPUTE = "none, with compute_dtype=bfloat16"
_FLOAT8 = "float8_tensorwise or float8_rowwise"

VALUES = {
    "precision.kind": {
        **dict.fromkeys(("bf16", "bfloat16", "high", "16", "amp"), _COMPUTE),
        **dict.fromkeys(("fp32", "float32", "32"), "none, with compute_dtype=float32"),
        **dict.fromkeys(("fp8", "float8", "e4m3"), _FLOAT8),
        **dict.fromkeys(("fp16", "float16", "nf4", "mxfp4", "4bit"), ""),
        "fp4": "nvfp4",
        "8bit": "int8_rowcol",
        "tensorwise": "float8_tensorwise",
        "rowwise": "float8_rowwise",
        "blockwise": "float8_blockwise",
    },
    "compute_dtype": {"bf16": "bfloat16", "fp32": "float32", "fp16": "", "float16": ""},
    "export.dtype": {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"},
    "optimizer.kind": {
        **dict.fromkeys(("adamw8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "ao_adamw_8bit"), "adamw_8bit"),
    },
    "device": {"gpu": "cuda", "cuda:0": "cuda; CUDA_VISIBLE_DEVICES says which"},
    "activation_checkpointing": {"true": "selective or full", "block": "selective or full"},
}
"""Key -> a value that others write -> what it is here; empty: there is nothing like it."""

SWITCHES = {
    "compile": {"true": "block", "false": "none"},
    "activation_checkpointing": {"false": "none"},
    "resume": {"true": "auto", "false": "none"},
}
"""Key -> what true and false mean for a choice that others switch on and off."""


def key_here(key: str, sections: Collection[str]) -> str:
    """What `key` (dotted) of another trainer is called here, for the end of an error; empty if unknown.

    sections: those of this config. A key in one of these sections is looked up by its last part only if the
    answer lies in the same section (`optimizer.learning_rate`) or nowhere: `data.output` is not `output_dir`.
    """
    section, _, last = key.rpartition(".")
    meant = KEYS.get(key) or KEYS.get(last, "")
    if not meant:
        return ""
    if section in sections and key not in KEYS and not meant.startswith((f"{section}.", "there is none")):
        return ""
    return f"; {meant}" if meant.startswith("there is none") else f"; here that is {meant}"
