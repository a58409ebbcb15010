"""Every tokenizer class of transformers, on every tokenizer, against AutoTokenizer, id for id.

    python -m tests.proofs.fuzz_tokenizers --folders ../shared/assets/tokenizers/* [--classes NAME …]

A folder is made for each class x tokenizer x variant of tokenizer_config.json and its neighbours. lptune
loads it with ids equal to transformers' on every text, or refuses it in one line. Exits with 1 at a
difference.
"""

import argparse
import itertools
import json
import logging
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from lptune.base.errors import UserError
from lptune.data import load_tokenizer

TEXTS = [
    "", " ", "  ", "\n", "\n\n a", " \n \n", "hello world", " hello", "hello ", "a  b   c    d",
    "tab\t\ttab", "▁a ▁", "▁▁", "<s>hello</s>x", "<s> hello </s> x", "<unk>", " <unk> ", "<mask>",
    "<pad> x", "<|endoftext|>", "a <|endoftext|> b", "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|> <|im_end|>", "<|begin_of_text|>hi <|end_of_text|> x", "[INST] x [/INST]",
    "<|start_story|>Once<|end_story|> x",
    "▁<PRE> x ▁<SUF>", "<FILL_ME>x", "<new> <new>x<new2> x<lone>y <lone> z", "<NEW>", "x<img>y",
    "naïve é e\u0301", "don't I'LL we'Ve", "<|padding|>", "Zwei 123 4567 Füchse\r\n\r\n  x", "🎉🎉 x",
    "👩\u200d👩\u200d👧", "İstanbul ǅ ﬁ", "१२३ 45", "你好，世界 カタ", "\u200b\ufeff\u00a0", "\ufeffx",
    "a\x00b", "�", "\x7f\x1b[0m", "مرحبا שלום", "नमस्ते", "한국어 각", "  def f(x):\n\treturn x  # y\n",
    "https://x.y/z?a=b&c=d", "a" * 300, " " * 70 + "x", "1234567890" * 5,
]  # fmt: skip
MODEL_TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3", None,
)  # fmt: skip
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def class_names() -> list[str]:
    """The names of all tokenizer classes that transformers has, and a few that it does not know."""
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    names = {name for name in TOKENIZER_MAPPING_NAMES.values() if name}
    names |= {name for name in dir(transformers) if name.endswith(("Tokenizer", "TokenizerFast"))}
    generic = {"TokenizersBackend", "PreTrainedTokenizer", "PreTrainedTokenizerFast", "PythonBackend"}
    unknown = {"BloomTokenizerFast", "OursTokenizer", "LlamaTokenizerFast", "Qwen2TokenizerFast"}
    return sorted((names | generic | unknown) - {"AutoTokenizer"})


def byte_level() -> tokenizers.Tokenizer:
    """A byte-level BPE of some 400 tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(backend, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"], alphabet)


def pieces() -> tokenizers.Tokenizer:
    """A BPE of "▁" and characters with byte tokens, as Llama 2's."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = _trained(backend, special, [])
    bos = [("<s>", 1)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="$A $B", special_tokens=bos)
    return backend


def _trained(backend: tokenizers.Tokenizer, special: list[str], alphabet: list[str]) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text for text in TEXTS if "<" not in text] * 3, trainer)
    spec = json.loads(backend.to_str())
    # Byte tokens are no added tokens in the files of others.
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def variants(spec: dict[str, Any], own: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Files beside tokenizer.json, by name: what folders in use look like, and what contradicts it."""
    texts = [token["content"] for token in spec.get("added_tokens", [])] or ["x"]
    loose = PLAIN | {"lstrip": True, "rstrip": True, "normalized": True, "special": False}
    yield "own", {"tokenizer_config.json": own}
    yield "bare", {"tokenizer_config.json": {}}
    added = {str(token["id"]): {"content": token["content"], **loose} for token in spec["added_tokens"][::2]}
    free = max([len(spec["model"]["vocab"]), *(token["id"] + 1 for token in spec["added_tokens"])])
    added |= {
        str(free + 1): {"content": "<new2>", **PLAIN},
        str(free): {"content": "<new>", **loose},
        str(free + 2): {"content": "<lone>", **PLAIN, "single_word": True},
    }
    named = {"__type": "AddedToken", "content": texts[-1], **PLAIN, "lstrip": True}
    yield (
        "decoder",
        {
            "tokenizer_config.json": {
                "added_tokens_decoder": added, "eos_token": named, "pad_token": "<PAD>",
                "image_token": "<img>", "extra_special_tokens": {"video_token": "<vid>"},
                "add_prefix_space": False, "bos_token": None, "add_eos_token": True,
            }
        },
    )  # fmt: skip
    yield (
        "old",
        {
            "tokenizer_config.json": {
                "legacy": True, "add_prefix_space": True, "bos_token": "<s>", "add_bos_token": False,
                "unk_token": {"__type": "AddedToken", "content": "<unk>", **PLAIN},
            },
            "special_tokens_map.json": {
                "bos_token": {"content": texts[0], **PLAIN}, "eos_token": "</s>",
                "additional_special_tokens": ["<img>", "x"],
            },
            "added_tokens.json": {"<new>": free, "<new2>": free + 1, "<img>": free + 2},
        },
    )  # fmt: skip


def compare(folder: Path, texts: Sequence[str] = TEXTS) -> str:
    """`equal`, `refused`, `not loadable by transformers`, or what differs."""
    import transformers

    try:
        ours = load_tokenizer(folder)
    except UserError as error:
        return "refused" if "\n" not in str(error) else f"DIFFERS: {error} has more than one line"
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
    except Exception:
        return "not loadable by transformers"
    for text, special in itertools.product(texts, (True, False)):
        if ours.infill_token and ours.infill_token in text:
            continue  # refused
        ids, expected = (
            _ids(ours.encode, text, add_special=special),
            _ids(theirs.encode, text, add_special_tokens=special),
        )
        if ids != expected:
            return f"DIFFERS: {text!r:.40} {ids} instead of {expected}"
    if ours.special_tokens != theirs.special_tokens_map:
        return f"DIFFERS: {ours.special_tokens} instead of {theirs.special_tokens_map}"
    if ours.vocab_size != max(theirs.get_vocab().values()) + 1:
        return f"DIFFERS: {ours.vocab_size} tokens instead of {max(theirs.get_vocab().values()) + 1}"
    return "equal"


def _ids(encode: Callable[..., list[int]], text: str, **options: bool) -> list[int] | str:
    """Ids, or the reason why the tokenizer has none."""
    try:
        return encode(text, **options)
    except UserError as error:
        return re.sub(".*can use: (.*); copy it again.*", r"\1", str(error))
    except Exception as error:
        if type(error) is not Exception:
            raise
        return str(error)


def compare_all(
    sources: dict[str, Path], names: Sequence[str], root: Path, say: Callable[[str], None], *, step: int = 1
) -> Counter[str]:
    """Every `step`-th class of `names` x source x variant; the model types take turns."""
    counts: Counter[str] = Counter()
    types = itertools.cycle(MODEL_TYPES)
    for source_name, source in sources.items():
        spec = json.loads((source / "tokenizer.json").read_text())
        config = source / "tokenizer_config.json"
        own = json.loads(config.read_text()) if config.is_file() else {}
        for number, (name, (variant, files)) in enumerate(itertools.product(names, variants(spec, own))):
            model_type = next(types)
            if number % step:
                continue
            folder = root / "case"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            (folder / "tokenizer.json").symlink_to((source / "tokenizer.json").resolve())
            for file, values in files.items():
                if file == "tokenizer_config.json":
                    values = {**values, "tokenizer_class": name}
                (folder / file).write_text(json.dumps(values))
            if model_type is not None:
                (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
            outcome = compare(folder)
            if outcome.startswith("DIFFERS"):
                say(f"{source_name} {name} {variant} {model_type}: {outcome}")
            counts[outcome.partition(":")[0]] += 1
    return counts


def main() -> int:
    """Compare what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folders", nargs="*", type=Path, default=[], help="tokenizer folders")
    parser.add_argument("--classes", nargs="*", help="names of classes; all")
    parser.add_argument("--step", type=int, default=1, help="only every so many cases")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as root:
        sources = {}
        for name, backend in (("small_byte_level", byte_level()), ("small_pieces", pieces())):
            sources[name] = Path(root) / name
            sources[name].mkdir()
            backend.save(str(sources[name] / "tokenizer.json"))
        sources |= {folder.name: folder for folder in arguments.folders}
        names = arguments.classes or class_names()
        counts: Counter[str] = Counter()
        for name, source in sources.items():
            counts += compare_all({name: source}, names, Path(root), print, step=arguments.step)
            print(f"after {name}: {dict(counts)}", flush=True)
    print(f"{sum(counts.values())} folders, {len(TEXTS)} texts each: {dict(counts)}")
    return int(counts["DIFFERS"] > 0)


if __name__ == "__main__":
    sys.exit(main())
