"""Mutated config.json files against transformers: what it loads we compute alike, or refuse in one line.

    python -m tests.proofs.fuzz_configs --num-configs 3000 --seed 1

A case is a family's tiny preset with one to four keys changed. The keys are those that the family's config
class declares, those that its modeling code and transformers' shared code read, and some that other families
know. The values are plausible (a preset's own, a neighbour's) or odd (null, 0, a text, a list). Then a
checkpoint of random weights is written, in one of the ways of storing a head, and both implementations load
the folder and compute the logits of the same tokens in float32. Each case is one of OUTCOMES, some of which
are DEFECTS.

The bound is that of the parity tests, 1e-4 of logits around 1. Some multipliers make rounding grow beyond it:
where it does not hold, the noise of transformers' own logits is measured, by moving every weight by at most
half a unit in the last place, and ten times that is allowed.
"""

import argparse
import copy
import inspect
import json
import logging
import random
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from lptune import checkpoint, models
from lptune.base.errors import UserError
from tests.helpers.models_oracle import random_tokens, randomize_

OUTCOMES = {
    "equal": "both load it, and the logits agree",
    "refused by both": "transformers does not load or run it, and we refuse it in one line",
    "refused only by us": "transformers loads it, we refuse it in one line",
    "not finite": "the logits of transformers are not finite, and we accept it",
    "accepted only by us": "transformers does not load or run it, we do",
    "mismatch": "both load it, and the logits differ",
    "our error": "anything but a UserError in one line",
}
DEFECTS = ("accepted only by us", "mismatch", "our error")

FAMILIES = {family: sizes["tiny"] for family, sizes in models.PRESETS.items() if "tiny" in sizes}
SHARED_CODE = ("masking_utils", "modeling_utils", "modeling_rope_utils", "configuration_utils")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")  # large without the key
SEQ_LENS = (24, 48)  # both sides of the original lengths (32), and longer than the windows (16)

# The family itself, code and files elsewhere, what runs attention, and what transformers checks only for its
# type: labels of classifiers, ids that only generation looks at, what forward() returns beside the logits.
_LEFT_ALONE = {
    *("model_type", "auto_map", "name_or_path", "architectures", "transformers_version"),
    *("num_labels", "id2label", "label2id", "problem_type", "bos_token_id", "eos_token_id"),
    *("output_hidden_states", "output_attentions", "return_dict", "use_return_dict"),
    *("attn_implementation", "_attn_implementation", "compile_config"),
    *("experts_implementation", "_experts_implementation"),
}

_ODD: list[Any] = [None, 0, -1, 1, 2, 0.5, True, False, "yes", "", [], {}, [1], {"a": 1}]
_NUMBERS: list[Any] = [None, 0, -1, 1, 2, 3, 8, 16, 0.0, 0.1, 0.5, 1.0, 2.5, 30.0, "2", True]
_TYPES = ("full_attention", "sliding_attention")

_VALUES: dict[str, list[Any]] = {
    "hidden_act": ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "swish", None, "sillu"],
    "hidden_activation": ["silu", "gelu", "gelu_pytorch_tanh", "relu", None, "sillu"],
    "tie_word_embeddings": [True, False, None, 1, "true"],
    "head_dim": [None, 8, 16, 32, 24, 0, -8, 5, 16.0],
    "num_key_value_heads": [None, 1, 2, 4, 3, 0, 8, 2.0],
    "max_position_embeddings": [None, 16, 32, 40, 64, 4096, 0, 64.5],
    "original_max_position_embeddings": [None, 16, 32, 64, 4096, 0, 1],
    "rms_norm_eps": [1e-5, 1e-6, 1e-3, 0.1, 0.0, None, 1, "1e-5"],
    "sliding_window": [None, 0, 1, 4, 16, 24, 1000, -1, 16.0, True],
    "sliding_window_pattern": [None, 0, 1, 2, 3, 6, -1, 2.0],
    "_sliding_window_pattern": [None, 1, 2, 3],
    "use_sliding_window": [True, False, None, 1],
    "max_window_layers": [None, 0, 1, 2, 28, -1],
    "attn_logit_softcapping": [None, 0, 0.0, 1.0, 5.0, 50.0, -3.0, 50],
    "final_logit_softcapping": [None, 0, 0.0, 1.0, 5.0, 30.0, -3.0, 30],
    "query_pre_attn_scalar": [None, 1, 16, 64, 256, 0, 24.5, -4],
    "no_rope_layers": [None, [], [1, 0] * 2, [0] * 4, [1, 1], [1, 0] * 3, [True, False] * 2, [2, 0, 1, 1]],
    "no_rope_layer_interval": [None, 0, 1, 2, 3, 4, 7, -1],
    "attention_dropout": [0.0, 0.1, None, 1.0, 0],
    "dtype": [None, "float32", "bfloat16", "float16", "auto", "int8", "flaot32", "torch.float32"],
    "torch_dtype": [None, "float32", "bfloat16", "float16", "int8", "flaot32"],
    "pad_token_id": [None, 0, 5, 255, 256, 100000, -1, "0"],
    "rope_theta": [None, 100.0, 10000.0, 10000, 1.0, 1, 0.5, 0, -5.0, "10000"],
    "rope_local_base_freq": [None, 100.0, 10000.0, 1.0, 0.0],
    "partial_rotary_factor": [None, 1.0, 0.5, 0.25, 0.3, 1, 0.0, 2.0, -0.5, "0.5"],
    "is_causal": [True, False, None, 0, 1],
    "use_bidirectional_attention": [True, False, None, "all"],
    "attention_bias": [True, False, None, 1, "yes"],
    "mlp_bias": [True, False, None, 1],
    "embedding_multiplier": [0.5, 1.0, 12.0, 12, 0, None, -2.0],
    "logits_scaling": [0.5, 1.0, 8.0, 8, 0, None, -2.0],
    "residual_multiplier": [0.22, 1.0, 2, 0, None, -1.0],
    "attention_multiplier": [0.015625, 0.25, 1.0, 1, 0, None, -0.25],
    "pretraining_tp": [None, 1, 2, 4, 0],
    "quantization_config": [None, {}, {"quant_method": "fp8"}, {"quant_method": "awq", "bits": 4}],
    "chunk_size_feed_forward": [0, 1, 4, None],
    "attention_chunk_size": [None, 8, 16],
    "text_config": [None, {}, {"vocab_size": 300}],
    "layer_norm_eps": [1e-1],
    "resid_pdrop": [0.0, 0.1, None, 0, "0"],
    "embd_pdrop": [0.0, 0.1, None, 0],
    "per_layer_config": [None, {}, {"0": {}}, {"0": {"sliding_window": 4}}],
    "transformers_weights": [None, "model.safetensors", "other.safetensors"],
    "configuration_files": [None, [], ["config.4.0.0.json"]],
    "vocab_size": [256, 300, None, "256"],
    "hidden_size": [64, 48, 60, None, 64.0],
    "intermediate_size": [128, 100, None, 0],
    "num_hidden_layers": [1, 3, 4, None, 0, "2"],
    "num_attention_heads": [2, 3, 4, 6, 8, None, 0],
    "clip_qkv": [None, 0.1, 8.0],
    "layer_types": [],  # by _layer_types
    "rope_scaling": [],  # by _rope
    "rope_parameters": [],
}  # fmt: skip

_ROPE_VALUES: dict[str, list[Any]] = {
    "rope_theta": [100.0, 5000.0, 10000, None, 1.0, 1, 0],
    "factor": [1.0, 2.0, 4, 8.0, 0.5, None, 0, -2.0, "2"],
    "original_max_position_embeddings": [16, 32, 64, None, 1, 0, 32.0, 4096],
    "attention_factor": [1.0, 0.7, None, 0.0, 1.3, -1.0, 1],
    "beta_fast": [32, 16.0, None, 0, 4, 1],
    "beta_slow": [1, 2.0, None, 0, 32],
    "mscale": [1.0, 0.7, None, 0, 1],
    "mscale_all_dim": [1.0, 1.2, None, 0],
    "truncate": [True, False, None, 0, 1],
    "low_freq_factor": [1.0, 2, None, 0, 4.0],
    "high_freq_factor": [4.0, 8, None, 1.0, 0],
    "partial_rotary_factor": [1.0, 0.5, 0.25, None, 1, 0.3],
    "unknown": [1],
    "type": ["linear", "default", "su", "yarn", None],
}
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "su": ("short_factor", "long_factor"),
    "proportional": ("factor",),
    "nonsense": (),
}
HEADS = ("as it is", "both", "head only", "embedding only", "another head")


class Case(NamedTuple):
    """One checkpoint to be."""

    family: str
    content: dict[str, Any]
    changes: dict[str, Any]
    """The keys that differ from the preset; a key that was taken out has the value "(out)"."""
    head: str
    """One of HEADS: how the file stores embedding and head."""


def known_keys(family: str) -> list[str]:
    """What transformers may look at in a config.json of this preset's family, and what others know."""
    config_class = type(transformers.AutoConfig.for_model(FAMILIES[family]["model_type"]))
    keys = {field.name for field in fields(config_class)}
    package = config_class.__module__.rpartition(".")[0]
    stem = package.rpartition(".")[2]
    modules = [f"{package}.modeling_{stem}", f"{package}.configuration_{stem}"]
    modules += [f"transformers.{name}" for name in SHARED_CODE]
    for name in modules:
        source = inspect.getsource(__import__(name, fromlist=["_"]))
        keys |= set(re.findall(r"\bconfig\.([a-z_]+[a-z0-9_]*)", source))
        keys |= set(re.findall(r"(?:getattr|hasattr)\([a-z_.]*config, *\"([a-z0-9_]+)\"", source))
        if name != "transformers.modeling_utils":  # whose kwargs are those of from_pretrained
            keys |= set(re.findall(r"kwargs\.(?:pop|get)\(\"([a-z0-9_]+)\"", source))
    methods = {name for name in dir(config_class) if callable(getattr(config_class, name, None))}
    methods |= {name for name in keys if name.startswith(("base_model_", "sub_config"))}  # of the class
    return sorted((keys | _VALUES.keys()) - methods - _LEFT_ALONE)


def make_case(rng: random.Random, family: str, keys: list[str]) -> Case:
    """A mutation of the family's tiny preset."""
    content = copy.deepcopy(FAMILIES[family]) | {"dtype": "float32"}
    changes: dict[str, Any] = {}
    likely = [key for key in keys if key in _VALUES]
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        draw = rng.random()
        if draw < 0.25:
            key = rng.choice(("rope_scaling", "rope_parameters", "rope_parameters", "layer_types"))
        elif draw < 0.85:
            key = rng.choice(likely)
        else:
            key = rng.choice(keys)
        if key in content and rng.random() < 0.15 and key not in _SIZES:
            del content[key]
            changes[key] = "(out)"
            continue
        content[key] = changes[key] = _value(rng, key, content)
    return Case(family, content, changes, rng.choice(HEADS))


def _value(rng: random.Random, key: str, content: dict[str, Any]) -> Any:
    if key == "layer_types":
        return _layer_types(rng, content.get("num_hidden_layers"))
    if key in ("rope_scaling", "rope_parameters"):
        return _rope(rng, content)
    if values := _VALUES.get(key):
        return copy.deepcopy(rng.choice(values))
    present = content.get(key)
    numeric = isinstance(present, int | float) and not isinstance(present, bool)
    return copy.deepcopy(rng.choice(_NUMBERS if numeric else _ODD))


def _layer_types(rng: random.Random, num_layers: Any) -> Any:
    num_layers = num_layers if type(num_layers) is int else 2
    odd = [
        None,
        [],
        "full_attention",
        ["full_attention"] * (num_layers + 1),
        ["chunked_attention"] * num_layers,
    ]
    if rng.random() < 0.2:
        return rng.choice([*odd, ["attention"] * num_layers, ["mamba"] * num_layers])
    return [rng.choice(_TYPES) for _ in range(num_layers)]


def _rope(rng: random.Random, content: dict[str, Any]) -> Any:
    draw = rng.random()
    if draw < 0.08:
        return rng.choice([None, {}, "linear", [], {"full_attention": None}])
    if draw < 0.3:
        kinds = rng.choice((_TYPES, _TYPES, _TYPES[:1], _TYPES[1:], (*_TYPES, "chunked_attention")))
        nested: dict[str, Any] = {kind: _one_rope(rng, content) for kind in kinds}
        if rng.random() < 0.2:
            nested[rng.choice(list(nested))] = None
        return nested | ({"rope_theta": 500.0} if rng.random() < 0.1 else {})
    return _one_rope(rng, content)


def _one_rope(rng: random.Random, content: dict[str, Any]) -> dict[str, Any]:
    kind = rng.choice((*_ROPE_NEEDS, "yarn", "longrope", "llama3", "linear", "default"))
    head_dim = content.get("head_dim")
    if type(head_dim) is not int:
        sizes = content.get("hidden_size"), content.get("num_attention_heads")
        head_dim = sizes[0] // sizes[1] if all(type(size) is int and size > 0 for size in sizes) else 16
    partial = content.get("partial_rotary_factor")
    rotated = int(head_dim * partial) if isinstance(partial, int | float) and partial > 0 else head_dim
    count = max(0, rotated // 2) + rng.choice((0, 0, 0, 0, 0, 1, -1))
    rope: dict[str, Any] = {rng.choice(("rope_type", "rope_type", "type")): kind}
    for key in _ROPE_NEEDS[kind]:
        if rng.random() < 0.07:
            continue
        if key in ("short_factor", "long_factor"):
            start = 1.0 if key == "short_factor" else 3.0
            rope[key] = (
                [start + i / 8 for i in range(count)] if rng.random() < 0.9 else rng.choice([None, [1], "2"])
            )
        else:
            plain = _ROPE_VALUES[key][:4] if rng.random() < 0.8 else _ROPE_VALUES[key]
            rope[key] = rng.choice([value for value in plain if value is not None] or plain)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        key = rng.choice(list(_ROPE_VALUES))
        rope[key] = rng.choice(_ROPE_VALUES[key])
    return rope


def _theirs(case: Case, folder: Path) -> list[Tensor] | str:
    """Writes the folder; the logits of transformers, one for each of SEQ_LENS, or why it has none."""
    (folder / "config.json").write_text(json.dumps(case.content), encoding="utf-8")
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        randomize_(model, 0)
        _store(model.state_dict(), case.head, folder)
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            return f"does not fit: {report}"
        with torch.no_grad():
            logits = [loaded.eval()(random_tokens(2, seq_len)).logits.float() for seq_len in SEQ_LENS]
            _noise.clear()
            _noise.append(lambda: _noise_of(loaded, logits))
            return logits
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


_noise: list[Callable[[], float]] = []


def _noise_of(model: torch.nn.Module, logits: list[Tensor]) -> float:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter *= 1 + 2**-24 * (2 * torch.rand(parameter.shape, generator=generator) - 1)
    moved = [model(random_tokens(2, seq_len)).logits.float() for seq_len in SEQ_LENS]
    return max(float((a - b).abs().max()) for a, b in zip(logits, moved, strict=True))


def _store(state: dict[str, Tensor], head: str, folder: Path) -> None:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = {name: tensor.clone() for name, tensor in state.items()}
    tied = state[names[0]].data_ptr() == state[names[1]].data_ptr()
    if head == "another head":
        tensors[names[1]] = tensors[names[1]].flip(0)
    elif tied and head != "both":
        del tensors[names[0] if head == "head only" else names[1]]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def _ours(folder: Path) -> list[Tensor]:
    # The config first: where transformers does not load it, there are no weights.
    models.read_config(folder)
    index = checkpoint.read_index(folder)
    model = models.build_on_meta(checkpoint.read_config(index, lambda note: None))
    checkpoint.match_tensors(model, index)
    model.to_empty(device="cpu")
    model.reset_buffers()
    checkpoint.load_hf(model, index)
    with torch.no_grad():
        return [model(random_tokens(2, seq_len)) for seq_len in SEQ_LENS]


def try_case(case: Case) -> tuple[str, str]:
    """(one of OUTCOMES, details)."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz_configs_"))
    try:
        theirs = _theirs(case, folder)
        try:
            if isinstance(theirs, str):
                models.read_config(folder)
                return "accepted only by us", theirs
            ours = _ours(folder)
        except UserError as error:
            if "\n" in str(error):
                return "our error", str(error)
            reason = (
                f"{str(error).removeprefix(str(folder))} | {theirs if isinstance(theirs, str) else 'fine'}"
            )
            return ("refused by both" if isinstance(theirs, str) else "refused only by us"), reason
        if not all(logits.isfinite().all() for logits in theirs):
            return "not finite", ""
        differences = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
        scale = max(1.0, *(float(logits.std()) for logits in theirs))
        if not max(differences) <= 1e-4 * scale:
            with torch.no_grad():
                noise = _noise[0]()
            if not max(differences) <= 10 * noise:
                return "mismatch", f"{differences} where the noise is {noise:.1e}, std {scale:.1f}"
        return "equal", f"{max(differences) / scale:.1e}"
    except Exception:
        return "our error", traceback.format_exc()
    finally:
        shutil.rmtree(folder)


def cases(num_configs: int, seed: int) -> list[Case]:
    """The same for the same seed; the families in turn."""
    rng = random.Random(seed)
    keys = {family: known_keys(family) for family in FAMILIES}
    families = list(FAMILIES)
    return [
        make_case(rng, families[i % len(families)], keys[families[i % len(families)]])
        for i in range(num_configs)
    ]


def quiet() -> None:
    """transformers warns of most of what is tried here."""
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def main() -> int:
    """Prints the counts, and each defect; 1 where there was one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-configs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", nargs="*", default=list(DEFECTS), help="outcomes to print case by case")
    arguments = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for number, case in enumerate(cases(arguments.num_configs, arguments.seed)):
        outcome, details = try_case(case)
        counts[outcome] += 1
        if outcome in arguments.show:
            print(
                f"{number} {outcome}: {case.family} {case.changes} head: {case.head}: {details}", flush=True
            )
    for outcome, meaning in OUTCOMES.items():
        print(f"{counts[outcome]:6d}  {outcome}: {meaning}")
    return int(any(counts[outcome] for outcome in DEFECTS))


if __name__ == "__main__":
    sys.exit(main())
