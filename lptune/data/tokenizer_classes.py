"""Effects of `tokenizer_class`: transformers replaces parts of tokenizer.json when it loads a folder.

For some classes, AutoTokenizer of transformers 5 and newer keeps only vocabulary, merges and post-processor
of tokenizer.json, and rebuilds normalizer, pre-tokenizer and decoder from the class. For example, the file of
Llama 2 puts "▁" before every piece between two special tokens, the class only before the first. The file and
the library then give different ids. A model that is fine-tuned here is used through transformers (or vLLM,
which calls it), so lptune follows transformers. A class is refused unless its ids are known to be equal:
`python -m tests.proofs.fuzz_tokenizers` compares all classes of transformers id for id.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

Spec = dict[str, Any]
"""The parsed content of tokenizer.json, tokenizer_config.json …"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerClass:
    """What one tokenizer class of transformers does."""

    rebuild: Callable[[Spec, Spec], None] | None = None
    """Rewrites tokenizer.json in place, given tokenizer_config.json; None: the class does not change it."""
    special_tokens: dict[str, str] = dataclasses.field(default_factory=dict)
    """Special tokens of the class for names that the folder lacks, in the order of registration."""
    extra_special_tokens: tuple[str, ...] = ()
    """Special tokens of the class without a name."""
    writes_bos: bool = False
    """Whether the class puts bos before every text, even if tokenizer.json does not."""
    infill_token: str = ""
    """A text with this token is split into prefix and suffix."""
    resets_flags: bool = False
    """Whether the class finally resets `lstrip`, `rstrip` … of special tokens."""


# Families for which transformers uses the registered class unless the folder declares another one.
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
# For these the registered class wins over the class that the folder declares.
_REGISTERED_WINS = ("qwen2", "phi3")

_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
_SPIECE_DECODERS: list[Spec] = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_DECODER = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def loading_class(is_byte_level: bool, config: Spec, model_config: Spec) -> str:
    """The name of the class that AutoTokenizer of transformers loads, without code from the checkpoint.

    is_byte_level: whether tokenizer.json contains "ByteLevel" in quotes. `config` is
    tokenizer_config.json, `model_config` config.json (empty where absent).
    """
    declared = str(config.get("tokenizer_class") or model_config.get("tokenizer_class") or "")
    declared = declared.removesuffix("Fast")
    model_type = str(model_config.get("model_type", ""))
    registered = _REGISTERED.get(model_type, "")
    auto_map = config.get("auto_map")
    if auto_map and (not isinstance(auto_map, dict) or auto_map.get("AutoTokenizer")):
        return declared or registered or "TokenizersBackend"
    wins = model_type in _REGISTERED_WINS
    if declared == "LlamaTokenizer" and is_byte_level and not wins:
        return "TokenizersBackend"
    if registered and declared and registered != declared:
        return registered if wins or registered == "TokenizersBackend" else declared
    return declared or registered or "TokenizersBackend"


def _llama(spec: Spec, config: Spec) -> None:
    prefix_space = config.get("add_prefix_space") in (None, True)
    scheme = ("always" if config.get("legacy") else "first") if prefix_space else "never"
    _set_model(spec, fuse_unk=True, byte_fallback=True, affix=None)
    _set_spiece(spec, scheme, strips=prefix_space)


def _code_llama(spec: Spec, config: Spec) -> None:
    prefix_space = config.get("add_prefix_space") in (None, True)
    _set_model(spec, fuse_unk=True, byte_fallback=True, affix=None)
    spec["model"]["unk_token"] = _unknown_token(config)
    _set_spiece(spec, "first" if prefix_space else "never", strips=True)


def _gemma(spec: Spec, config: Spec) -> None:
    _set_model(spec, fuse_unk=True, byte_fallback=True, affix=None)
    spec["model"]["unk_token"] = _unknown_token(config)
    spec["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    spec["pre_tokenizer"] = {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
    }  # fmt: skip
    spec["decoder"] = {"type": "Sequence", "decoders": _SPIECE_DECODERS}


def _qwen(pattern: str) -> Callable[[Spec, Spec], None]:
    def rebuild(spec: Spec, config: Spec) -> None:
        _set_byte_level(spec, config, normalizer={"type": "NFC"})
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        byte_level = {**spec["pre_tokenizer"], "use_regex": False}
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}

    return rebuild


def _gpt2(spec: Spec, config: Spec) -> None:
    _set_byte_level(spec, config, normalizer=None)


def _gpt_neox(spec: Spec, config: Spec) -> None:
    _set_byte_level(spec, config, normalizer={"type": "NFC"})
    spec["post_processor"] = None


def _unknown_token(config: Spec) -> str:
    # The class passes `str(unk_token)` to BPE, also for None.
    return str(token_text(config["unk_token"])) if "unk_token" in config else "<unk>"


def _set_spiece(spec: Spec, scheme: str, *, strips: bool) -> None:
    spec["normalizer"] = None
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    spec["pre_tokenizer"] = metaspace
    strip = [_STRIP_DECODER] if strips else []
    spec["decoder"] = {"type": "Sequence", "decoders": [*_SPIECE_DECODERS, *strip]}


def _set_byte_level(spec: Spec, config: Spec, *, normalizer: Spec | None) -> None:
    _set_model(spec, fuse_unk=False, byte_fallback=False, affix="")
    spec["normalizer"] = normalizer
    spec["pre_tokenizer"] = {**_BYTE_LEVEL, "add_prefix_space": bool(config.get("add_prefix_space"))}
    spec["decoder"] = _BYTE_LEVEL


def _set_model(spec: Spec, *, fuse_unk: bool, byte_fallback: bool, affix: str | None) -> None:
    # Most classes pass no unk_token to BPE: a character outside of the vocabulary vanishes instead of
    # becoming <unk>. No class keeps tokenizer.json's added tokens: they are registered anew.
    spec["model"].update(
        dropout=None, unk_token=None, continuing_subword_prefix=affix, end_of_word_suffix=affix,
        fuse_unk=fuse_unk, byte_fallback=byte_fallback, ignore_merges=False,
    )  # fmt: skip
    spec["added_tokens"] = []


_AS_IT_IS = TokenizerClass()
_END = "<|endoftext|>"
_SPIECE_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_FILL_TOKENS = {
    "prefix_token": "▁<PRE>", "middle_token": "▁<MID>", "suffix_token": "▁<SUF>", "eot_token": "▁<EOT>",
    "fill_token": "<FILL_ME>",
}  # fmt: skip
_GEMMA_TOKENS = {
    "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>",
    "mask_token": "<mask>",
}  # fmt: skip
_GPT_TOKENS = {"bos_token": _END, "eos_token": _END, "unk_token": _END}
_QWEN_TOKENS = {"eos_token": _END, "unk_token": _END, "pad_token": _END}

CLASSES: dict[str, TokenizerClass] = {
    "TokenizersBackend": _AS_IT_IS,
    "PreTrainedTokenizer": _AS_IT_IS,
    "PythonBackend": _AS_IT_IS,
    "BloomTokenizer": _AS_IT_IS,
    "LlamaTokenizer": TokenizerClass(rebuild=_llama, special_tokens=_SPIECE_TOKENS),
    "CodeLlamaTokenizer": TokenizerClass(
        rebuild=_code_llama, special_tokens=_SPIECE_TOKENS | _FILL_TOKENS,
        extra_special_tokens=tuple(_FILL_TOKENS.values()), writes_bos=True,
        infill_token="<FILL_ME>",
    ),
    "GemmaTokenizer": TokenizerClass(rebuild=_gemma, special_tokens=_GEMMA_TOKENS),
    "GPT2Tokenizer": TokenizerClass(rebuild=_gpt2, special_tokens=_GPT_TOKENS),
    "CodeGenTokenizer": TokenizerClass(rebuild=_gpt2, special_tokens=_GPT_TOKENS),
    "GPTNeoXTokenizer": TokenizerClass(
        rebuild=_gpt_neox, special_tokens={**_GPT_TOKENS, "pad_token": "<|padding|>"}
    ),
    "Qwen2Tokenizer": TokenizerClass(
        rebuild=_qwen(_QWEN2_PATTERN), special_tokens=_QWEN_TOKENS, resets_flags=True
    ),
    "Qwen3_5Tokenizer": TokenizerClass(rebuild=_qwen(_QWEN3_5_PATTERN), special_tokens=_QWEN_TOKENS),
}  # fmt: skip
"""Class name -> its effects. A class that is not listed is refused."""


def refusal(name: str, spec: Spec, config: Spec) -> str | None:
    """Why class `name` may give other ids than transformers on these files; None if ids are known to be
    equal.
    """
    if name not in CLASSES:
        return (
            f"tokenizer_class: transformers' {name} is not known to give the ids of tokenizer.json; where it "
            'does, set "tokenizer_class": "PreTrainedTokenizerFast"'
        )
    if CLASSES[name].rebuild is not None and (
        spec["model"].get("type", "BPE") != "BPE" or not isinstance(spec["model"].get("vocab"), dict)
    ):
        return (
            f"tokenizer_class: transformers' {name} makes BPE of any tokenizer.json, and this one is "
            f'{spec["model"].get("type")}; set "tokenizer_class": "PreTrainedTokenizerFast"'
        )
    if config.get("split_special_tokens"):
        return "split_special_tokens: special tokens in text are not split here; remove the key"
    if set(config.get("fast_tokenizer_files") or ()) - {"tokenizer.json"}:
        return "fast_tokenizer_files: transformers may read another file than tokenizer.json; remove the key"
    if config.get("fix_mistral_regex") and r"[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]" not in repr(
        spec.get("pre_tokenizer")
    ):
        return (
            "fix_mistral_regex: transformers may replace the pre-tokenizer of tokenizer.json; write the "
            "fixed one with AutoTokenizer.from_pretrained(…, fix_mistral_regex=True).save_pretrained(…)"
        )
    return None


def untrim_offsets(node: Any) -> None:
    """Switches `trim_offsets` off everywhere in `node`. Ids stay the same, and the offsets of a token then
    include its space.
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
