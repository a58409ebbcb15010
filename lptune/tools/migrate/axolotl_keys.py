"""The keys of axolotl whose meaning does not depend on others, and the table of all keys."""

from pathlib import PurePosixPath
from typing import Any

from lptune.tools.migrate.common import EIGHT_BIT, PAGED
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

_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), ("adamw", "")),
    **dict.fromkeys(
        ("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "ao_adamw_8bit"), ("adamw", EIGHT_BIT)
    ),
    **dict.fromkeys(("ao_adamw_4bit", "adamw_torch_4bit", "ao_adamw_fp8"), ("adamw", EIGHT_BIT)),
    "paged_adamw_32bit": ("adamw", PAGED),
    "paged_adamw_8bit": ("adamw", f"{EIGHT_BIT}; {PAGED}"),
}


def _base_model(draft: Draft, key: str, value: Any) -> None:
    name = str(value)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        draft.set("model.path", name, key)
        return
    draft.set("model.path", f"checkpoints/{PurePosixPath(name).name}", key)
    draft.ask("model.path", f"lptune download {name}   (into that folder)")


def _bf16(draft: Draft, key: str, value: Any) -> None:
    if value in (True, "auto", "full", "true"):
        note = "weights are loaded in bf16 there; here the optimizer updates float32 weights"
        draft.set("compute_dtype", "bfloat16", key, note=note)
    elif draft.get("fp16") not in (True, "true"):
        draft.set("compute_dtype", "float32", key)
    else:
        draft.drop(key, OFF)


def _fp16(draft: Draft, key: str, value: Any) -> None:
    if value in (True, "true"):
        draft.drop(key, NOT_OFFERED, "float16 needs a loss scale; bfloat16 or float32")
        draft.ask("compute_dtype", "bfloat16 or float32, in place of float16")
    else:
        draft.drop(key, OFF)


def _epochs(draft: Draft, key: str, value: Any) -> None:
    number = draft.number(key, 1.0)
    note = "" if number == int(number) else f"{number} there; num_steps takes a part of an epoch"
    draft.set("num_epochs", max(1, round(number)), key, note=note)


def _reinit(draft: Draft, key: str, value: Any) -> None:
    if value is True:
        draft.drop(key, NOT_OFFERED, "a run trains the weights in model.path")
        draft.ask("model.path", "a folder with random weights, from `lptune new-checkpoint`")
    else:
        draft.drop(key, OFF)


def _unfrozen(draft: Draft, key: str, value: Any) -> None:
    draft.drop(key, BY_DESIGN, "freeze names what is not trained, this key names what is")
    draft.ask("freeze", f"the layers outside of {value!r:.50}")


def _special_tokens(draft: Draft, key: str, value: Any) -> None:
    draft.drop(key, BY_DESIGN, "special tokens are those of the tokenizer in model.path; change them there")


def _template(draft: Draft, key: str, value: Any) -> None:
    if str(value).startswith("tokenizer_default"):
        draft.drop(key, NOT_NEEDED, "the tokenizer's template is the default")
        return
    draft.drop(
        key, BY_DESIGN, "templates have no names; without data.chat_template the tokenizer's own is used"
    )
    draft.ask(
        "data.chat_template", f"a jinja file of the template {value}, if the tokenizer's own is another"
    )


_TOKENIZER = drop(NOT_NEEDED, "the tokenizer is read from model.path")
_LAUNCH = drop(NOT_NEEDED, "FSDP2 shards the model; ranks are a flag of `lptune run`")
_TRACKER = drop(NOT_NEEDED, "the tracker's own environment variables")
_KERNEL = drop(NOT_NEEDED, "compilation and the kernels here do this")
_ATTENTION = drop(NOT_NEEDED, "the attention backend is chosen by the device")
_PACKED = drop(NOT_NEEDED, "packing is planned before the first step")
_CACHED = drop(NOT_NEEDED, "tokenized once, into data.cache; rows are always shuffled")
_WATCHDOG = drop(BY_DESIGN, "diverged_after_steps ends a run whose loss is not finite")

RULES: Rules = {
    "base_model": _base_model,
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
    "num_epochs": _epochs,
    "max_steps": integer_to("num_steps"),
    "optimizer": choice("optimizer.kind", _OPTIMIZERS),
    "learning_rate": number_to("optimizer.lr"),
    "weight_decay": number_to("optimizer.weight_decay"),
    "adam_beta1": number_to("optimizer.beta1"),
    "adam_beta2": number_to("optimizer.beta2"),
    **each("adam_{epsilon,eps}", number_to("optimizer.eps")),
    "max_grad_norm": number_to("max_grad_norm"),
    **each("lr_scheduler warmup_{ratio,steps} cosine_{min,constant}_lr_ratio", later),
    **each("{evals,saves}_per_epoch", later),
    **each("bf16 bfloat16", _bf16),
    **each("fp16 float16", _fp16),
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
    "reinit_weights": _reinit,
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
