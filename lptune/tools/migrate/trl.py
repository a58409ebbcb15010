"""TRL's commands sft, dpo and kto: arguments of transformers' Trainer with other defaults, and TRL's own.

The command stands on the command line and not in a YAML file; there, keys that one command alone has say it.

Keys and defaults are those of TRL at f2cd57710 (July 2026).
"""

from collections.abc import Mapping
from typing import Any

from lptune.tools.migrate import trainer
from lptune.tools.migrate.draft import (
    BY_DESIGN,
    NOT_NEEDED,
    NOT_OFFERED,
    OFF,
    Draft,
    Rules,
    drop,
    each,
    if_on,
    later,
    number_to,
    refuse,
    to,
    walk,
)
from lptune.tools.migrate.entries import Entry, keys_of, set_sources, take, take_place

_RECIPES = {"sft": "full_finetune", "dpo": "full_dpo", "kto": "full_kto"}
_OF_DPO = (
    "beta", "label_smoothing", "precompute_ref_log_probs", "sync_ref_model", "ref_model_mixup_alpha",
    "ref_model_sync_steps", "f_divergence_type", "loss_weights", "ld_alpha", "use_weighting", "discopop_tau",
)  # fmt: skip
_OF_KTO = ("desirable_weight", "undesirable_weight")
_LOSSES = {"sigmoid": "dpo", "ipo": "ipo"}
_LOSSES_OF_SFT = {"nll", "chunked_nll", "dft"}
_LENGTH = 1024  # of a document, if max_length is not given


def fill(draft: Draft) -> None:
    """Fills `draft` from a config of TRL. Raises UserError (one line) for adapters and other trainers."""
    if draft.get("use_peft") or draft.get("load_in_4bit") or draft.get("load_in_8bit"):
        raise refuse(draft, "trains adapters", "; there is no LoRA here")
    command = draft.command or _command(draft)
    if command not in _RECIPES:
        raise refuse(draft, f"trl {command} has no recipe here", "; sft, dpo and kto have")
    draft.recipe = _RECIPES[command]
    walk(draft, RULES)
    _fill_data(draft)
    if command == "sft":
        _set_loss_tokens(draft)
    elif command == "dpo":
        _set_preference(draft)
    else:
        draft.set("kto.beta", draft.number("beta", 0.1), *draft.given("beta"))
        why = (NOT_NEEDED, "") if draft.get("loss_type") == "kto" else (NOT_OFFERED, "kto is offered")
        draft.drop_given(*why, "loss_type")
    defaults = {
        "data.seq_len": trainer.of_row(draft, _LENGTH),
        "compute_dtype": "bfloat16",
        "optimizer.lr": 2e-5 if command == "sft" else 1e-6,
    }
    trainer.fill_arguments(draft, defaults, recomputes=True)


def _command(draft: Draft) -> str:
    """sft, dpo or kto, by keys that one of them alone has."""
    losses = set(draft.names("loss_type")) - _LOSSES_OF_SFT
    command = "dpo" if losses or draft.given(*_OF_DPO) else "sft"
    command = "kto" if draft.given(*_OF_KTO) else command
    draft.assumed.append(f"the file is one of `trl {command}`, by its keys.")
    return command


def _set_loss_tokens(draft: Draft) -> None:
    if draft.get("loss_type") == "dft":
        draft.drop("loss_type", NOT_OFFERED, "dft: the loss is the cross-entropy of the tokens")
    else:
        draft.drop_given(NOT_NEEDED, "the loss is computed in chunks", "loss_type")
    ours, keys = "data.train_on_prompt", draft.given("assistant_only_loss", "completion_only_loss")
    if draft.get("assistant_only_loss") or draft.get("completion_only_loss"):
        draft.set(ours, False, *keys)
    elif draft.get("completion_only_loss") is False:
        draft.set(ours, True, *keys)
    else:
        draft.set(ours, False, *keys, note="of messages every token is learned there")
        draft.ask(ours, "true, if rows are messages, learns every token as there; else leave it")


def _set_preference(draft: Draft) -> None:
    listed = draft.names("loss_type") or ["sigmoid"]
    if len(listed) == 1 and listed[0] in _LOSSES:
        draft.set("preference.loss", _LOSSES[listed[0]], *draft.given("loss_type"))
    else:
        draft.drop("loss_type", NOT_OFFERED, f"{', '.join(listed)}: sigmoid and ipo are offered")
        draft.ask("preference.loss", "dpo, ipo, simpo or orpo")
    draft.set("preference.beta", draft.number("beta", 0.1), *draft.given("beta"))
    trainer.set_label_smoothing(draft, "label_smoothing")


# ---- data


def _fill_data(draft: Draft) -> None:
    """data.source and the held-out rows from dataset_name, or from the list `datasets`."""
    listed = draft.get("datasets", [])
    if not isinstance(listed, list) or not all(isinstance(each, Mapping) for each in listed):
        raise draft.error("datasets", "must be a list of sections with `path`")
    split = draft.given("dataset_train_split")
    if listed:
        draft.drop_given(OFF, "datasets holds", "dataset_name", "dataset_config")
        set_sources(draft, [_entry(draft, f"datasets[{i}]", each) for i, each in enumerate(listed)])
    elif draft.get("dataset_name") is not None:
        name, config = str(draft.get("dataset_name")), draft.get("dataset_config")
        draft.set("data.source", f"{name}:{config}" if config else name,
                  *draft.given("dataset_name", "dataset_config"))  # fmt: skip
        if split:
            draft.set("data.split", draft.get(*split), *split)
    else:
        trainer.ask_for_source(draft)
    trainer.set_held_out(draft, "test_split_size")
    strategies = draft.given("eval_strategy", "evaluation_strategy")
    if (
        strategies
        and draft.get(strategies[0]) not in ("no", False)
        and not listed
        and not draft.get("test_split_size")
    ):
        keys = draft.given("dataset_test_split")
        draft.set("data.eval_source", draft.value_of("data.source"), *keys)
        draft.set("data.eval_split", str(draft.get("dataset_test_split", "test")), *keys)
    else:
        draft.drop_given(OFF, "eval_strategy is no there", "dataset_test_split")


def _entry(draft: Draft, key: str, about: Mapping[str, Any]) -> Entry:
    rest = keys_of(draft, key, about, "path")
    place, keys = take_place(draft, key, rest, "path")
    if not isinstance(place, str):
        raise draft.error(key, "names no `path`")
    found: Entry = {"source": (place, keys, "")}
    take(rest, key, {"split": "split"}, found)
    for name in rest:
        draft.drop(f"{key}.{name}", NOT_OFFERED)
        draft.ask("data.source", f"{key}.{name}: name the files, and weights of sources, in data.source")
    return found


def _template(draft: Draft, key: str, value: Any) -> None:
    if str(value).endswith((".jinja", ".jinja2", ".j2")):
        draft.set("data.chat_template", str(value), key)
    else:
        draft.drop(key, BY_DESIGN, "the template of another tokenizer")
        draft.ask("data.chat_template", f"a jinja file with the template of {value}")


_ADAPTER = drop(NOT_NEEDED, "no effect there without an adapter")
_PREPARED = drop(NOT_NEEDED, "tokenized once, into data.cache, on all cores")
_ROWS = drop(NOT_NEEDED, "rows have data.seq_len tokens, and documents in them no padding")
_REFERENCE = if_on(BY_DESIGN, "the reference is the model before training, computed once")
_MORE = if_on(NOT_OFFERED, "another loss is a copy of the recipe")

RULES: Rules = {
    **trainer.RULES,
    "env": drop(NOT_NEEDED, "the shell's variables"),
    **each("config accelerate_config num_processes num_machines", drop(NOT_NEEDED, "flags of `lptune run`")),
    **each("dataset_{name,config,train_split,test_split} datasets test_split_size", later),
    **each("dataset_streaming streaming dataset_{num_proc,kwargs} shuffle_dataset", _PREPARED),
    "ignore_bias_buffers": if_on(NOT_NEEDED),
    "dataset_text_field": to("data.text_column"),
    "chat_template_path": _template,
    **each("eos_token pad_token", drop(BY_DESIGN, "special tokens are those of the tokenizer in model.path")),
    "max_length": trainer.row_length,
    "max_seq_length": trainer.row_length,
    "max_prompt_length": drop(BY_DESIGN, "a preference that is too long is dropped and counted"),
    "truncation_mode": drop(BY_DESIGN, "the end is cut"),
    "packing": to("data.packing"),
    "packing_strategy": drop(BY_DESIGN, "best fit; longer pairs and chats are cut, texts become chunks"),
    "eval_packing": drop(BY_DESIGN, "held-out rows are packed as training rows are"),
    **each("padding_free pad_to_multiple_of", _ROWS),
    **each("assistant_only_loss completion_only_loss", later),
    **each("model_revision model_init_kwargs", drop(NOT_NEEDED, "the folder in model.path holds the model")),
    **each("dtype torch_dtype", drop(BY_DESIGN, "the optimizer updates float32 weights (optimizer.master)")),
    "router_aux_loss_coef": drop(BY_DESIGN, "config.json in model.path says it"),
    "disable_dropout": drop(NOT_NEEDED, "there is none"),
    **each("loss_type beta label_smoothing", later),
    "desirable_weight": number_to("kto.desirable_weight"),
    "undesirable_weight": number_to("kto.undesirable_weight"),
    **each(
        "precompute_ref_{log_probs,batch_size} sync_ref_model ref_model_{mixup_alpha,sync_steps}", _REFERENCE
    ),
    **each(
        "ld_alpha loss_weights f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau", _MORE
    ),
    **each("use_peft load_in_{8bit,4bit}", drop(OFF)),
    **each("lora_{r,alpha,dropout,target_modules,target_parameters,modules_to_save,task_type}", _ADAPTER),
    **each("use_{rslora,dora,bnb_nested_quant} bnb_4bit_quant_{type,storage}", _ADAPTER),
}
