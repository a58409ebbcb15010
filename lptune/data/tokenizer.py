"""The tokenizer of a checkpoint folder: text <-> ids, its special tokens and its chat templates.

`tokenizers.Tokenizer` does the work, in Rust and on all cores. This module reads the files of the folder as
transformers does (which class rebuilds what, which tokens are special, which template counts), so that ids
equal those of AutoTokenizer.

The encodings of `encode_batch` map characters to tokens. Offsets of a token include its leading space
(`trim_offsets` is switched off), so a span of text is exactly the tokens that hold one of its characters.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from lptune.base.errors import UserError, closest
from lptune.base.files import MEBI, kind_of, parse_json, read_bytes, read_text
from lptune.data import rust
from lptune.data.alphabet import Alphabet, alphabet_of
from lptune.data.special_tokens import NAMED, SpecialTokens, special_tokens
from lptune.data.templates import MAX_SOURCE_CHARS, ChatTemplate, Rendered
from lptune.data.tokenizer_classes import CLASSES, TokenizerClass, loading_class, refusal, untrim_offsets

_MAX_JSON_CHARS = 256 * MEBI
"""Largest tokenizer.json in characters; that of a vocabulary of 262,144 has 33 MB."""
TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")
"""Suffixes of a file that data.chat_template may name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A loaded tokenizer. Ids equal those of transformers' AutoTokenizer on the same folder."""

    backend: tokenizers.Tokenizer
    """The Rust tokenizer."""
    folder: Path
    """The folder that it was read from."""
    special_tokens: dict[str, str]
    """`bos_token`, `eos_token` … -> text: the variables of a chat template."""
    bos_id: int | None
    eos_id: int | None
    pad_id: int
    """Id of padding. If the folder names none: the eos token, or 0."""
    prefix_ids: tuple[int, ...]
    """Ids that the tokenizer puts before every text with `add_special` (usually bos, or nothing)."""
    suffix_ids: tuple[int, ...]
    """Ids that it puts after every text with `add_special`."""
    template: ChatTemplate | None
    """The chat template in use; None: there is none."""
    alphabet: Alphabet | None
    """The known characters, if the tokenizer drops others; otherwise None."""
    continuation: str
    """Text of a special token. Text after it is tokenized as in the middle of a text. Empty if the start of a
    text is tokenized no differently.
    """

    infill_token: str = ""
    """A text with this token is refused: transformers splits such a text into prefix and suffix."""
    learned_stops: tuple[int, ...] = ()
    """Ids that end an answer besides those of the files: of a run's checkpoint, what its rows taught."""
    given_template: str | None = None
    """`data.chat_template` of the config, which `template` was made from; None: it is that of the folder."""

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def chat_template(self) -> str | None:
        """The jinja source of the chat template, for exports; None if there is none."""
        return self.template.sources["default"] if self.template else None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of `text`; with `add_special` also those that the tokenizer puts around every text."""
        self._refuse_infilling([text])
        with rust.errors_of(self.folder):
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special).ids
        return ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special: bool = False, offsets: bool = True
    ) -> list[tokenizers.Encoding]:
        """Encodings of many texts, on all cores. Without `offsets` it is faster, and characters do not map to
        tokens.
        """
        # Set explicitly, so that a later fork (workers of torch.compile) does not print a warning.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        self._refuse_infilling(texts)
        encode = self.backend.encode_batch if offsets else self.backend.encode_batch_fast
        with rust.errors_of(self.folder):  # such as an unknown token that is not in the vocabulary
            encodings: list[tokenizers.Encoding] = encode(list(texts), add_special_tokens=add_special)
        return encodings

    def _refuse_infilling(self, texts: Sequence[str]) -> None:
        if self.infill_token and any(self.infill_token in text for text in texts):
            raise UserError(
                f"{self.folder}: a text holds {self.infill_token}, at which transformers splits it into "
                "prefix and suffix; write their tokens yourself, or remove it"
            )

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`, by default without special tokens."""
        text: str = self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)
        return text

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """`messages` as text, by the chat template. Encode the result with `add_special=False`. Raises
        UserError without a template.
        """
        if self.template is None:
            raise UserError(
                f"{self.folder}: the tokenizer has no chat template; set data.chat_template to one"
            )
        rendered: Rendered = self.template.render(
            messages, tools, add_generation_prompt=add_generation_prompt
        )
        return rendered.text

    def with_chat_template(self, chat_template: str, *, date: date | None = None) -> "Tokenizer":
        """The same tokenizer with `data.chat_template`: jinja text, the path of a .jinja file, or `none`.

        date: see `load_tokenizer`; None: that of the template so far.
        """
        sources = _given_template(chat_template)
        template = None
        if sources:
            template = ChatTemplate(
                sources,
                self.special_tokens,
                self.special_texts,
                where="data.chat_template",
                date=date or (self.template.date if self.template else None),
            )
        return dataclasses.replace(self, template=template, given_template=chat_template)

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """Texts of special tokens, which the tokenizer never splits: `<|im_end|>`, `</s>` …"""
        added = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)


def load_tokenizer(folder: Path, chat_template: str | None = None, *, date: date | None = None) -> Tokenizer:
    """The tokenizer in `folder` (tokenizer.json, and tokenizer_config.json, chat_template.jinja … where
    present).

    `chat_template` (`data.chat_template` of the config) replaces that of the folder: jinja text, a path, or
    `none`. `date`: today for templates that write the date. A resumed run passes the day of its start, since
    its tokens must not change at midnight. Raises UserError, with the name of the file, for a missing or
    broken file.
    """
    folder = Path(folder)
    spec, is_byte_level = _read_spec(folder)
    config = _read_json(folder / "tokenizer_config.json")
    _check_types(folder / "tokenizer_config.json", config)
    model_config = _read_json(folder / "config.json")
    name = loading_class(is_byte_level, config, model_config)
    reason = refusal(name, spec, config)
    if reason is not None:
        raise UserError(f"{folder / 'tokenizer_config.json'}: {reason}")
    kind = CLASSES[name]
    tokens = _read_special_tokens(folder, spec, config, kind)
    if kind.rebuild is not None:
        kind.rebuild(spec, config)
    untrim_offsets(spec.get("post_processor"))
    untrim_offsets(spec.get("pre_tokenizer"))
    spec["truncation"] = spec["padding"] = None
    rust.check_growth(spec, folder)
    special = tokens.texts
    with rust.errors_of(folder):
        backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
        tokens.register(backend, kind.resets_flags)
        if kind.writes_bos:
            backend.post_processor = _bos_before(special.get("bos_token"), backend)

    ids = {key: backend.token_to_id(text) for key, text in special.items()}
    eos_id = ids.get("eos_token")
    if eos_id is None:
        eos_id = _configured_eos(folder, model_config)
    pad_id = next((i for i in (ids.get("pad_token"), eos_id) if i is not None), 0)
    with rust.errors_of(folder):
        prefix, suffix = _surroundings(backend)
        continuation = _continuation(backend, special)
    special_texts = {token.content for token in backend.get_added_tokens_decoder().values()}
    tokenizer = Tokenizer(
        backend=backend, folder=folder, special_tokens=special, bos_id=ids.get("bos_token"), eos_id=eos_id,
        pad_id=pad_id, prefix_ids=prefix, suffix_ids=suffix, template=None,
        alphabet=alphabet_of(spec, special_texts),
        continuation=continuation, infill_token=kind.infill_token,
    )  # fmt: skip
    where, sources = _own_templates(folder, config)
    if chat_template is not None:
        return tokenizer.with_chat_template(chat_template, date=date)
    if not sources:
        return tokenizer
    template = ChatTemplate(sources, special, tokenizer.special_texts, where=where, date=date)
    return dataclasses.replace(tokenizer, template=template)


def _read_spec(folder: Path) -> tuple[dict[str, Any], bool]:
    """tokenizer.json, and whether it contains the word "ByteLevel", which decides about the class."""
    path = folder / "tokenizer.json"
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; model.path names a Hugging Face checkpoint folder")
    if not path.is_file():
        others = [
            name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (folder / name).is_file()
        ]
        found = f"only {', '.join(others)}; convert it with transformers' AutoTokenizer and save_pretrained"
        raise UserError(
            f"{path}: not found, "
            f"{found if others else 'and no other tokenizer file; copy it from the original checkpoint'}"
        )
    spec = _read_json(path)
    if not isinstance(spec.get("model"), dict):
        raise UserError(
            f"{path}: not a tokenizer file: it has no `model` section; copy it again from the checkpoint"
        )
    return spec, '"ByteLevel"' in read_text(path, _MAX_JSON_CHARS)


def _read_json(path: Path) -> dict[str, Any]:
    if not kind_of(path, follow=True):
        return {}
    content = read_bytes(path, _MAX_JSON_CHARS)
    try:
        values = parse_json(content)
        if b"\\ud" in content:  # a pair \ud83d\ude00 is a character, half of it is not text
            json.dumps(values, ensure_ascii=False).encode()
    except ValueError as error:
        raise UserError(
            f"{path}: cannot be read as JSON: {error}; copy it again from the checkpoint"
        ) from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold a JSON object, found a {type(values).__name__}")
    return values


def _check_types(path: Path, config: dict[str, Any]) -> None:
    """Raises UserError for a value of tokenizer_config.json with a wrong type, among those read here."""
    expected = {
        "tokenizer_class": (str,), "chat_template": (str, list), "added_tokens_decoder": (dict,),
        "additional_special_tokens": (list, dict), "extra_special_tokens": (list, dict),
    } | dict.fromkeys(NAMED, (str, dict))  # fmt: skip
    names = {str: "text", list: "a list", dict: "an object"}
    for key, kinds in expected.items():
        value = config.get(key)
        if value and not isinstance(value, kinds):
            wanted = " or ".join(names[kind] for kind in kinds)
            raise UserError(f"{path}: {key}: expected {wanted}, found {value!r}; copy it again")
    for number in config.get("added_tokens_decoder") or {}:
        if not number.isdecimal():
            raise UserError(f"{path}: added_tokens_decoder: expected ids as keys, found {number!r}")


def _read_special_tokens(
    folder: Path, spec: dict[str, Any], config: dict[str, Any], kind: TokenizerClass
) -> SpecialTokens:
    files = {name: _read_json(folder / name) for name in ("special_tokens_map.json", "added_tokens.json")}
    try:
        return special_tokens(spec, {"tokenizer_config.json": config, **files}, kind)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise UserError(
            f"{folder}: the special tokens of tokenizer.json, tokenizer_config.json or "
            f"special_tokens_map.json cannot be read: {error}; copy the files again from the checkpoint"
        ) from None


def _bos_before(bos: str | None, backend: tokenizers.Tokenizer) -> tokenizers.processors.PostProcessor:
    """A post-processor that puts `bos` before every text."""
    if bos is None:
        return tokenizers.processors.TemplateProcessing(single="$A", pair="$A $B")
    special = [(bos, backend.token_to_id(bos))]
    return tokenizers.processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=special
    )


def _configured_eos(folder: Path, model_config: dict[str, Any]) -> int | None:
    for values in (_read_json(folder / "generation_config.json"), model_config):
        eos = values.get("eos_token_id")
        if isinstance(eos, list) and eos:
            eos = eos[0]
        if isinstance(eos, int) and not isinstance(eos, bool):
            return eos
    return None


def _surroundings(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the post-processor puts before and after a text."""
    encoding = backend.encode("a", add_special_tokens=True)
    inner = [place for place, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
    if not inner:
        return tuple(encoding.ids), ()
    return tuple(encoding.ids[: inner[0]]), tuple(encoding.ids[inner[-1] + 1 :])


def _continuation(backend: tokenizers.Tokenizer, special: dict[str, str]) -> str:
    """`Tokenizer.continuation`: tokenizers like sentencepiece put a space before a text, not within it."""
    alone = backend.encode("a", add_special_tokens=False).ids
    for text in special.values():
        after = backend.encode(f"{text}a", add_special_tokens=False).ids
        if len(after) > 1 and after[0] == backend.token_to_id(text) and after[1:] != alone:
            return text
    return ""


def _own_templates(folder: Path, config: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Name -> chat template of the folder. Files win over tokenizer_config.json, as in transformers."""
    path = folder / "chat_template.jinja"
    extras = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if path.is_file() or extras:
        # transformers keeps a byte order mark as a character.
        named = {file.stem: _read_text(file, "utf-8") for file in extras}
        if path.is_file():
            named = {"default": _read_text(path, "utf-8")} | named
        _check_default(str(path), named)
        return str(path), named
    where, value = str(folder / "tokenizer_config.json"), config.get("chat_template")
    if isinstance(value, str):
        return where, {"default": value}
    if isinstance(value, list):
        both = ("name", "template")
        if not all(isinstance(t, dict) and all(isinstance(t.get(key), str) for key in both) for t in value):
            raise UserError(
                f"{where}: chat_template: expected a list of {{name: …, template: …}}, found {value!r:.60}; "
                "set data.chat_template"
            )
        named = {t["name"]: t["template"] for t in value}
        _check_default(where, named)
        return where, named
    return where, {}


def _check_default(where: str, named: dict[str, str]) -> None:
    if named and "default" not in named:
        raise UserError(
            f"{where}: there is no chat template named 'default' (found {', '.join(named)}); set "
            "data.chat_template"
        )


def _given_template(value: str) -> dict[str, str]:
    if value == "none":
        return {}
    looks_like_path = "{" not in value and "\n" not in value
    path = Path(value)
    try:
        path = path.expanduser()
        exists = looks_like_path and path.is_file()
    except (OSError, RuntimeError):  # too long for a file name, or the home of an unknown user
        exists = False
    if exists:
        # The template is exported, so it may be published, and a config may come from other people. So it
        # may only name files whose suffix says that they are templates.
        for file in (path, path.resolve()):
            if file.suffix not in TEMPLATE_SUFFIXES:
                raise UserError(
                    f"data.chat_template: {file}: is exported with the model, so its name must end in "
                    f"{', '.join(TEMPLATE_SUFFIXES)}; rename the file"
                )
        return {"default": _read_text(path, "utf-8-sig")}
    if looks_like_path:
        files = path.parent.iterdir() if path.parent.is_dir() else ()
        names = [entry.name for entry in files if entry.is_file()]
        raise UserError(
            f"data.chat_template: {value!r} is neither a jinja template nor an existing file"
            f"{closest(path.name, names)}; give one of the two, or none"
        )
    return {"default": value}


def _read_text(path: Path, encoding: str) -> str:
    try:
        return read_text(path, MAX_SOURCE_CHARS, encoding)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from None
