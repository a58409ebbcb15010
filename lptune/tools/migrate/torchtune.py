"""torchtune's YAML: `_component_` names an object with its arguments, `${output_dir}` another key.

Keys, defaults and dataset builders are those of torchtune 0.7 at bd2a0fc7c (April 2026), recipes
full_finetune_single_device and full_finetune_distributed.
"""

import re
from collections.abc import Mapping
from typing import Any

from lptune.tools.migrate import torchtune_data
from lptune.tools.migrate.common import MASTER, set_batches, set_defaults
from lptune.tools.migrate.draft import (
    NOT_OFFERED,
    OFF,
    Draft,
    choice,
    leaves,
    refuse,
    walk,
)
from lptune.tools.migrate.torchtune_keys import NO_LIMIT, RULES

_MAX_REFERENCES = 32


def fill(draft: Draft) -> None:
    """Fills `draft` from a torchtune config. Raises UserError (one line) for LoRA, QAT, DPO and others."""
    draft.values = _resolved(draft, draft.values)
    _check_kind(draft)
    walk(draft, RULES, ("clip_grad_norm", "seed", "run_val_every_n_steps", "tokenizer.max_seq_len"))
    torchtune_data.fill(draft)
    _set_batches(draft)
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
    if draft.get("quantizer") is not None:
        raise refuse(draft, "a quantizer means quantization-aware training (QAT)", "; there is no QAT here")
    for missing in ("model", "optimizer"):
        if not draft.section(missing):
            raise refuse(draft, f"is no training config (it has no `{missing}`)", "")


def _resolved(draft: Draft, value: Any) -> Any:
    """`value` with `${key}` replaced by the value of that key; `${oc.env:…}` stays, since lptune reads it."""
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


def _set_batches(draft: Draft) -> None:
    shared = draft.integer("tensor_parallel_dim", 1) * draft.integer("context_parallel_dim", 1)
    steps = draft.integer("gradient_accumulation_steps", 1)
    keys = draft.given("batch_size", "gradient_accumulation_steps")
    set_batches(
        draft, (draft.integer("batch_size", 1), draft.given("batch_size")), (None, keys), shared, steps
    )


def _set_float8(draft: Draft) -> None:
    keys = [key for key in ("enable_fp8_training", "fp8_recipe_name") if key in draft.values]
    if draft.get("enable_fp8_training") is not True:
        for key in keys:
            draft.drop(key, OFF)
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


def _dtype(draft: Draft, key: str, value: Any) -> None:
    choice("compute_dtype", {"bf16": ("bfloat16", MASTER), "fp32": ("float32", "")})(draft, key, value)
