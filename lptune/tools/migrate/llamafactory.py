"""LLaMA-Factory's YAML: arguments of transformers' Trainer, and its own for model, data and method.

Keys and defaults are those of LLaMA-Factory at ff6d4d12e (August 2026). A data set is a name, which
dataset_info.json explains; it is looked for in `dataset_dir`, below the current folder and the file's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lptune.base.files import read_object
from lptune.tools.migrate import trainer
from lptune.tools.migrate.draft import (
    BY_DESIGN,
    MASTER,
    NOT_NEEDED,
    NOT_OFFERED,
    OFF,
    PROMPTS,
    Draft,
    Rules,
    drop,
    each,
    if_on,
    integer_to,
    later,
    number_to,
    refuse,
    to,
    walk,
)

_RECIPES = {"sft": "full_finetune", "pt": "continued_pretrain", "dpo": "full_dpo", "kto": "full_kto"}
_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_TEMPLATES = {
    "llama3": "llama3", "gemma": "gemma", "gemma2": "gemma", "gemma3": "gemma", "phi": "phi",
    "zephyr": "zephyr", "chatml": "chatml",
}  # fmt: skip
_MAX_BYTES = 4 * 2**20


def fill(draft: Draft) -> None:
    """Fills `draft` from a config of LLaMA-Factory. Raises UserError (one line) for adapters and for stages
    that have no recipe here.
    """
    _check_method(draft)
    stage = str(draft.get("stage", "sft"))
    draft.recipe = _RECIPES[stage]
    walk(draft, RULES)
    _fill_data(draft, stage)
    if stage == "dpo":
        _set_preference(draft)
    elif stage == "kto":
        draft.set("kto.beta", draft.number("pref_beta", 0.1), *draft.given("pref_beta"))
    trainer.set_float8(draft)
    if draft.get("use_muon") is True:
        draft.set("optimizer.kind", "muon", "use_muon")
    packs = draft.get("neat_packing") or draft.get("packing", stage == "pt")
    draft.set("data.packing", packs is True, *draft.given("packing", "neat_packing"))
    trainer.fill_arguments(draft, {}, recomputes=True)


def _check_method(draft: Draft) -> None:
    method, stage = str(draft.get("finetuning_type", "lora")), str(draft.get("stage", "sft"))
    if method != "full":
        if method == "freeze":
            raise refuse(draft, "finetuning_type: freeze trains some layers", "; freeze=… names the others")
        default = "" if draft.get("finetuning_type") else ", the default,"
        raise refuse(draft, f"finetuning_type: {method}{default} trains adapters", "; there is no LoRA here")
    if draft.get("quantization_bit"):
        raise refuse(draft, "quantization_bit: loads weights that only adapters train", "")
    if stage not in _RECIPES:
        raise refuse(draft, f"stage: {stage} is no fine-tuning on answers or preferences", "")


def _set_preference(draft: Draft) -> None:
    loss = str(draft.get("pref_loss", "sigmoid"))
    if loss not in _LOSSES:
        draft.drop("pref_loss", NOT_OFFERED, f"{loss}: sigmoid, ipo, orpo and simpo are offered")
        draft.ask("preference.loss", f"pref_loss: {loss} is not offered")
    else:
        draft.set("preference.loss", _LOSSES[loss], *draft.given("pref_loss"))
    draft.set("preference.beta", draft.number("pref_beta", 0.1), *draft.given("pref_beta"))
    key = "simpo_gamma"
    if loss == "simpo":
        draft.set("preference.target_margin", draft.number(key, 0.5), *draft.given(key))
    else:
        draft.drop_given(OFF, "simpo alone has it", key)
    trainer.set_label_smoothing(draft, "dpo_label_smoothing")


# ---- data


def _fill_data(draft: Draft, stage: str) -> None:
    """data.source and data.eval_source from the names of data sets and dataset_info.json."""
    folder, known = _known_data(draft)
    for key, ours in (("dataset", "source"), ("eval_dataset", "eval_source")):
        found = [_entry(draft, key, folder, known, name, stage) for name in draft.names(key)]
        if not found:
            continue
        if len(found) == 1 and ours == "source":
            for column, value in found[0].items():
                note = PROMPTS if column == "format" and value == "pairs" else ""
                draft.set(f"data.{column}", value, key, note=note)
        else:
            given = [entry if len(entry) > 1 else entry["source"] for entry in found]
            pairs = any(entry.get("format") == "pairs" for entry in found)
            draft.set(f"data.{ours}", given, key, note=PROMPTS if pairs else "")
    if draft.get("dataset") is None:
        trainer.ask_for_source(draft)
    trainer.set_held_out(draft, "val_size")


def _known_data(draft: Draft) -> tuple[Path, dict[str, Any]]:
    """The folder of the data sets, and what dataset_info.json says of them; nothing where it is not found."""
    name = str(draft.get("dataset_dir", "data"))
    for base in (Path(), *draft.file.absolute().parents):
        file = base / name / "dataset_info.json"
        if file.is_file():
            draft.assumed.append(f"the data sets are those of {file}.")
            return base / name, read_object(file, max_bytes=_MAX_BYTES, todo="mend the file")
    return Path(name), {}


def _entry(
    draft: Draft, key: str, folder: Path, known: Mapping[str, Any], name: str, stage: str
) -> dict[str, Any]:
    """Keys of a source for the data set `name`."""
    about = known.get(name)
    if not isinstance(about, Mapping):
        where = "which is not in it" if known else "which was not found"
        draft.ask(
            f"data.{key.replace('dataset', 'source')}", f"{name}: is explained by dataset_info.json, {where}"
        )
        return {"source": f"FILL-IN-{name}.jsonl"}
    if (hub := about.get("hf_hub_url")) is not None:
        source = f"{hub}:{about['subset']}" if about.get("subset") else str(hub)
    else:
        file = about.get("file_name")
        source = str(folder / str(file)) if file else f"FILL-IN-{name}.jsonl"
        if not file:
            draft.ask("data.source", f"{name}: comes from ModelScope, a script or a cloud; download it")
    entry: dict[str, Any] = {"source": source}
    if about.get("split"):
        entry["split"] = about["split"]
    columns = about.get("columns")
    columns = columns if isinstance(columns, Mapping) else {}
    if stage == "pt":
        return entry | {"format": "text", "text_column": columns.get("prompt", "text")}
    if about.get("formatting") == "sharegpt":
        entry |= {"format": "chat", "messages_column": columns.get("messages", "conversations")}
        tags = about.get("tags")
        odd = {str(each) for each in tags.values()} - _TAGS if isinstance(tags, Mapping) else set()
        if odd:
            draft.ask("data.source", f"{name}: has other names in its messages: {', '.join(sorted(odd))}")
    else:
        entry |= {
            "format": "pairs",
            "prompt_column": columns.get("prompt", "instruction"),
            "input_column": columns.get("query", "input"),
            "response_column": columns.get("response", "output"),
        }
        if columns.get("history"):
            draft.ask(
                "data.source", f"{name}: its column {columns['history']} has earlier turns; make it a chat"
            )
    more = {"system": "system", "chosen": "chosen", "rejected": "rejected", "kto_tag": "label"}
    entry |= {f"{ours}_column": columns[theirs] for theirs, ours in more.items() if columns.get(theirs)}
    if stage in ("dpo", "kto"):
        entry.pop("format")
    if stage == "dpo":
        entry.pop("response_column", None)
    return entry


_TAGS = {
    "from", "value", "role", "content", "human", "user", "gpt", "assistant", "system", "tool", "observation",
    "function_call",
}  # fmt: skip


def _template(draft: Draft, key: str, value: Any) -> None:
    name = _TEMPLATES.get(str(value))
    if name is not None:
        draft.set("data.chat_template", name, key, note="without it the tokenizer's own")
    else:
        draft.drop(
            key, BY_DESIGN, "the tokenizer's own chat template is used; data.chat_template names another"
        )


def _pure_bf16(draft: Draft, key: str, value: Any) -> None:
    if value is True:
        draft.set("compute_dtype", "bfloat16", key, note=MASTER)
    else:
        draft.drop(key, OFF)


_OPTIMIZER = if_on(NOT_OFFERED, "optimizer.kind: adamw, adamw_8bit, adamw_bf16, muon and sgd are")
_LOSS = if_on(NOT_OFFERED, "the loss is the cross-entropy of the tokens; another is a copy of the recipe")
_ADAPTER = drop(NOT_NEEDED, "no effect there without an adapter")
_TOKENIZER = if_on(BY_DESIGN, "the vocabulary is that of the checkpoint")
_CACHED = drop(NOT_NEEDED, "tokenized once, into data.cache, on all cores")
_IMAGES = drop(NOT_NEEDED, "the text part is trained")
_TWO_MODELS = drop(BY_DESIGN, "the reference is the model before training")
_INFERENCE = drop(NOT_NEEDED, "the recipe generate")
_RUN = drop(NOT_NEEDED, "a flag of `lptune run`")

RULES: Rules = {
    **trainer.RULES,
    **each("stage finetuning_type", drop(NOT_NEEDED, "the recipe says it: `lptune run RECIPE`")),
    **each("dataset eval_dataset val_size packing neat_packing", later),
    "dataset_dir": drop(NOT_NEEDED, "data.source names the files"),
    "template": _template,
    "cutoff_len": trainer.row_length,
    "max_samples": integer_to("data.max_rows"),
    "train_on_prompt": to("data.train_on_prompt"),
    "mask_history": if_on(BY_DESIGN, "weight: 0 of a message takes it out of the loss"),
    "default_system": to("data.system_prompt"),
    **each("mix_strategy interleave_probs", drop(BY_DESIGN, "each source has a weight")),
    **each("{enable,preserve}_thinking tool_format", drop(BY_DESIGN, "the chat template decides")),
    **each("streaming buffer_size overwrite_cache preprocessing_{batch_size,num_workers}", _CACHED),
    **each("tokenized_path data_shared_file_system cache_dir", _CACHED),
    "ignore_pad_token_for_loss": drop(NOT_NEEDED, "padding is never learned"),
    **each("eval_on_each_dataset eval_num_beams", if_on(NOT_OFFERED)),
    "disable_shuffling": if_on(NOT_OFFERED, "rows are shuffled by seed and epoch"),
    **each("image_{max,min}_pixels video_{max_pixels,min_pixels,fps,maxlen} media_dir", _IMAGES),
    **each("freeze_{vision_tower,multi_modal_projector,language_model} crop_to_patches", _IMAGES),
    "image_do_pan_and_scan": _IMAGES,
    "pure_bf16": _pure_bf16,
    **each("fp8 fp8_enable_fsdp_float8_all_gather", later),
    "fp8_backend": drop(NOT_NEEDED, "the kernels are lptune's"),
    "use_muon": if_on(BY_DESIGN),
    **each("use_{badam,galore,apollo,adam_mini}", _OPTIMIZER),
    **each("badam_{mode,start_block,switch_mode,switch_interval,update_ratio,mask_mode,verbose}", _OPTIMIZER),
    **each("galore_{target,rank,update_interval,scale,proj_type,layerwise}", _OPTIMIZER),
    **each("apollo_{target,rank,update_interval,scale,proj,proj_type,scale_type}", _OPTIMIZER),
    **each("apollo_{layerwise,scale_front}", _OPTIMIZER),
    **each("use_{dft,asft,eaft}_loss asft_alpha eaft_alpha", _LOSS),
    **each("pref_{loss,beta} simpo_gamma dpo_label_smoothing", later),
    "pref_ftx": if_on(NOT_OFFERED, "orpo adds the loss of the chosen answer"),
    **each("ld_alpha pref_bco_weight", if_on(NOT_OFFERED)),
    **each("ref_model ref_model_{adapters,quantization_bit}", _TWO_MODELS),
    "kto_chosen_weight": number_to("kto.desirable_weight"),
    "kto_rejected_weight": number_to("kto.undesirable_weight"),
    "early_stopping_steps": integer_to("early_stop_after", minimum=0),
    "plot_loss": drop(NOT_NEEDED, "report.html has the curves"),
    **each("compute_accuracy include_effective_tokens_per_second print_param_status", if_on(NOT_OFFERED)),
    **each("flash_attn enable_liger_kernel use_unsloth use_unsloth_gc use_v1_kernels use_reentrant_gc",
           drop(NOT_NEEDED, "compilation and the kernels here do this")),
    **each("shift_attn mixture_of_depths", if_on(NOT_OFFERED)),
    "disable_gradient_checkpointing": later,
    **each("upcast_{layernorm,lmhead_output} low_cpu_mem_usage offload_folder",
           drop(NOT_NEEDED, "norms and the loss are computed in float32, weights are read piece by piece")),
    "rope_scaling": drop(BY_DESIGN, "config.json in model.path says it"),
    "moe_aux_loss_coef": drop(BY_DESIGN, "config.json in model.path says it"),
    "train_from_scratch": trainer.reinit,
    **each("resize_vocab split_special_tokens add_tokens add_special_tokens", _TOKENIZER),
    **each("new_special_tokens_config init_special_tokens", _TOKENIZER),
    **each("use_fast_tokenizer model_revision {hf,ms,om}_hub_token",
           drop(NOT_NEEDED, "the folder in model.path holds model and tokenizer")),
    **each("lora_{rank,alpha,dropout,target} additional_target create_new_adapter", _ADAPTER),
    **each("loraplus_lr_ratio use_{rslora,dora} pissa_{init,iter,convert}", _ADAPTER),
    **each("adapter_{name_or_path,folder}", _ADAPTER),
    **each("freeze_{trainable_layers,trainable_modules,extra_modules} use_llama_pro", _ADAPTER),
    **each("quantization_{bit,method,type,device_map} double_quantization", _ADAPTER),
    **each("infer_{backend,dtype} use_kv_cache predict_with_generate do_sample temperature", _INFERENCE),
    **each("generation_{max_length,num_beams} top_{p,k} num_beams max_{length,new_tokens}", _INFERENCE),
    "repetition_penalty": _INFERENCE,
    **each("ray_{num_workers,init_kwargs,run_name,storage_path} master_{addr,port}", _RUN),
    **each("resources_per_worker placement_strategy use_ray", _RUN),
    **each("enable_torch_profiler profile_modules", if_on(NOT_OFFERED)),
    **each("use_swanlab swanlab_{project,workspace,run_name,mode,api_key,logdir}", if_on(NOT_OFFERED)),
}  # fmt: skip
