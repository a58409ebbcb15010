"""What `tokenizer_class` changes: the parts of tokenizer.json that transformers replaces when it loads a
folder.

Since version 5, transformers' AutoTokenizer keeps only vocabulary, merges, added tokens and post-processor of
tokenizer.json for some classes and rebuilds normalizer, pre-tokenizer and decoder from the class. A Llama 2
file, for instance, puts "▁" before every piece between two special tokens, the class only before the first.
Ids then differ between file and library. A model fine-tuned here is used through transformers (or vLLM, which
calls it), so its choice is followed; `tests/data/test_tokenizer.py` compares id for id.
"""

import json
from typing import Any

# Families whose registered class transformers uses unless the folder declares another one of its own.
_REGISTERED = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "mistral": "TokenizersBackend",
    "phi3": "TokenizersBackend",
    "olmo2": "TokenizersBackend",
    "granite": "TokenizersBackend",
}
# For these the registered class wins over any that the folder declares.
_REGISTERED_WINS = ("qwen2", "phi3")

_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
_SPIECE_DECODERS: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]

DEFAULT_SPECIAL_TOKENS = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    },
    "GPT2Tokenizer": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
}
"""Special tokens of a class where the folder names none."""


def loading_class(spec: dict[str, Any], config: dict[str, Any], model_config: dict[str, Any]) -> str:
    """The transformers class that AutoTokenizer loads: `TokenizersBackend` (tokenizer.json as it stands) or
    one that rebuilds.

    `spec` is tokenizer.json, `config` tokenizer_config.json, `model_config` config.json (empty where absent).
    """
    declared = (config.get("tokenizer_class") or model_config.get("tokenizer_class") or "").removesuffix(
        "Fast"
    )
    model_type = str(model_config.get("model_type", ""))
    registered = _REGISTERED.get(model_type, "")
    if declared == "LlamaTokenizer" and '"ByteLevel"' in json.dumps(
        [spec.get("pre_tokenizer"), spec.get("decoder"), spec.get("post_processor")]
    ):
        return "TokenizersBackend"
    if registered and declared and registered != declared:
        if registered == "TokenizersBackend":
            return registered
        return registered if model_type in _REGISTERED_WINS else declared
    return declared or registered or "TokenizersBackend"


def recast(spec: dict[str, Any], name: str, config: dict[str, Any]) -> None:
    """Rewrite `spec` (tokenizer.json) in place as class `name` would; classes that rebuild nothing leave it
    alone.
    """
    model = spec.get("model", {})
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        return
    prefix_space = config.get("add_prefix_space")
    if name == "LlamaTokenizer":
        prefix_space = True if prefix_space is None else bool(prefix_space)
        scheme = ("always" if config.get("legacy") else "first") if prefix_space else "never"
        _set_model(model, fuse_unk=True, byte_fallback=True, affix=None)
        spec["normalizer"] = None
        spec["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": scheme,
            "split": False,
        }
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix_space else []
        spec["decoder"] = {"type": "Sequence", "decoders": [*_SPIECE_DECODERS, *strip]}
    elif name == "GemmaTokenizer":
        _set_model(model, fuse_unk=True, byte_fallback=True, affix=None)
        model["unk_token"] = token_text(config.get("unk_token")) or "<unk>"
        spec["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        spec["pre_tokenizer"] = {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
        }  # fmt: skip
        spec["decoder"] = {"type": "Sequence", "decoders": _SPIECE_DECODERS}
    elif name == "Qwen2Tokenizer":
        _set_model(model, fuse_unk=False, byte_fallback=False, affix="")
        split = {
            "type": "Split",
            "pattern": {"Regex": _QWEN2_PATTERN},
            "behavior": "Isolated",
            "invert": False,
        }
        byte_level = {**_BYTE_LEVEL, "add_prefix_space": bool(prefix_space), "use_regex": False}
        spec["normalizer"] = {"type": "NFC"}
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
        spec["decoder"] = _BYTE_LEVEL
    elif name == "GPT2Tokenizer":
        _set_model(model, fuse_unk=False, byte_fallback=False, affix="")
        spec["normalizer"] = None
        spec["pre_tokenizer"] = {**_BYTE_LEVEL, "add_prefix_space": bool(prefix_space)}
        spec["decoder"] = _BYTE_LEVEL


def untrim_offsets(node: Any) -> None:
    """Switch `trim_offsets` off everywhere in `node`: it changes no id, and a token's characters then include
    its space.
    """
    if isinstance(node, dict):
        if "trim_offsets" in node:
            node["trim_offsets"] = False
        for child in node.values():
            untrim_offsets(child)
    elif isinstance(node, list):
        for child in node:
            untrim_offsets(child)


def token_text(token: Any) -> str | None:
    """The text of a special token, written as a string or as a dict with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _set_model(model: dict[str, Any], *, fuse_unk: bool, byte_fallback: bool, affix: str | None) -> None:
    # The classes hand no unk_token to BPE: a character outside of the vocabulary vanishes instead of becoming
    # <unk>.
    model.update(
        dropout=None, unk_token=None, continuing_subword_prefix=affix, end_of_word_suffix=affix,
        fuse_unk=fuse_unk, byte_fallback=byte_fallback, ignore_merges=False,
    )  # fmt: skip
