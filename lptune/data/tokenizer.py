"""The tokenizer of a checkpoint folder: text <-> ids, its special tokens and its chat templates.

`tokenizers.Tokenizer` does the work, in Rust and on all cores. AutoTokenizer of transformers makes it of the
folder: some classes rebuild parts of tokenizer.json, so the file alone may give other ids.
AutoTokenizer works in another process (hf.py). It sees five files of the folder, which were read here before,
and no code of the checkpoint.

The encodings of `encode_batch` map characters to tokens. Offsets of a token include its leading space
(`trim_offsets` is switched off), so a span of text is exactly the tokens that hold one of its characters.
"""

import contextlib
import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from lptune.base.errors import UserError, closest
from lptune.base.files import MEBI, read_bytes, read_object, read_text
from lptune.base.model_folder import read_stop_ids
from lptune.data import hf
from lptune.data.named_templates import NAMED_TEMPLATES, note_on_missing, suggested
from lptune.data.templates import MAX_SOURCE_CHARS, ChatTemplate, Rendered

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
)
"""All that AutoTokenizer gets to see."""
_MAX_JSON_BYTES = 256 * MEBI
"""Largest tokenizer.json; that of a vocabulary of 262,144 has 33 MB."""
_MAX_CPU_S = 120.0
MAX_MEMORY = 4096 * MEBI
"""What AutoTokenizer may add to the memory of its process."""
TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")
"""Suffixes of a file that data.chat_template may name."""


_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
"""Writes each byte of a text as one of 256 letters, as byte-level BPE knows it."""


class Alphabet:
    """The characters that a tokenizer knows, to find those that it drops silently and to count them. Texts of
    special tokens are known as a whole.

    Tokenizers of the Llama class have no unknown token in transformers: a character that is neither in the
    vocabulary nor covered by byte tokens vanishes before the merges. Small vocabularies lack many characters.
    The tokens stay right, but all later character offsets are shifted, and with them a mask that is built on
    offsets. So such characters are removed from the text first, and the spans of the mask are moved along.

    spelling: `bytes` (byte-level BPE), `fallback` (characters, else their byte tokens) or `characters`.
    prepends: whether a "▁" is put before a text that does not start with one: `first`, `never`, or `always`,
    that is after special tokens too.
    """

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        special_texts: Iterable[str],
        *,
        spelling: str,
        prepends: str = "never",
    ) -> None:
        self._vocabulary = vocabulary
        self._spelling = spelling
        self._prepends = prepends
        self._known: dict[str, bool] = {} if spelling == "bytes" else {" ": "▁" in vocabulary}
        texts = sorted(filter(None, special_texts), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def knows(self, character: str) -> bool:
        """Whether `character` becomes part of a token."""
        if character not in self._known:
            spelled = [character]
            if self._spelling == "bytes":
                ((letters, _),) = _BYTE_LEVEL.pre_tokenize_str(character)
                spelled = [*letters]
            elif self._spelling == "fallback" and character not in self._vocabulary:
                spelled = [f"<0x{byte:02X}>" for byte in character.encode()]
            self._known[character] = all(each in self._vocabulary for each in spelled)
        return self._known[character]

    def unknown(self, text: str) -> list[int]:
        """Positions of the characters of `text` that no token holds."""
        missing = {character for character in set(text) if not self.knows(character)}
        if not missing:
            return []
        inside = {i for match in self._special.finditer(text) for i in range(*match.span())}
        return [i for i, character in enumerate(text) if character in missing and i not in inside]

    @property
    def shifts_offsets(self) -> bool:
        """Whether a dropped character shifts all later offsets. (In byte-level BPE it shifts only those of
        its own word.)
        """
        return self._spelling != "bytes"

    def without(
        self, text: str, places: Sequence[int], spans: Sequence[tuple[int, int]]
    ) -> tuple[str, list[tuple[int, int]]]:
        """`text` without the unknown characters at `places`, and `spans` moved. The tokens do not change."""
        starts = {0} if self._prepends != "never" else set()
        if self._prepends == "always":
            starts |= {match.end() for match in self._special.finditer(text)}
        # "=x" gets its "▁" before "=" is dropped, so a space must take the place of "=".
        spaces = {i for i in places if i in starts}
        removed = set(places) - spaces
        kept, before = [], [0]
        for i, character in enumerate(text):
            before.append(before[-1] + (i in removed))
            if i not in removed:
                kept.append(" " if i in spaces else character)
        return "".join(kept), [(start - before[start], stop - before[stop]) for start, stop in spans]


def alphabet_of(spec: Mapping[str, Any], special_texts: Iterable[str]) -> Alphabet | None:
    """The alphabet of tokenizer.json `spec`; None if no character can vanish, or if the rule for it is
    unknown.
    """
    model, splitter = spec["model"], spec.get("pre_tokenizer") or {}
    if model.get("type", "BPE") != "BPE" or model.get("unk_token") is not None:
        return None
    vocabulary = model["vocab"]
    if any(part.get("type") == "ByteLevel" for part in [splitter, *splitter.get("pretokenizers", [])]):
        complete = all(letter in vocabulary for letter in _BYTE_LEVEL.alphabet())
        return None if complete else Alphabet(vocabulary, special_texts, spelling="bytes")
    if splitter.get("type") != "Metaspace":
        return None
    fallback = bool(model.get("byte_fallback"))
    if fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return None
    prepends = splitter.get("prepend_scheme", "always")
    return Alphabet(
        vocabulary, special_texts, spelling="fallback" if fallback else "characters", prepends=prepends
    )


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
        with _errors_of(self.folder):
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
        with _errors_of(self.folder):  # such as an unknown token that is not in the vocabulary
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
                f"{self.folder}: the tokenizer has no chat template; {suggested(self.special_texts)}"
            )
        rendered: Rendered = self.template.render(
            messages, tools, add_generation_prompt=add_generation_prompt
        )
        return rendered.text

    def with_chat_template(self, chat_template: str, *, date: date | None = None) -> "Tokenizer":
        """The same tokenizer with `data.chat_template`: a name of named_templates.py, jinja text, the path of
        a .jinja file, or `none`.

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

    @property
    def template_note(self) -> str:
        """What to say where the named template writes tokens that this tokenizer has not; else empty."""
        return note_on_missing(self.given_template, _added_texts(self.backend))

    @property
    def start_note(self) -> str:
        """What to say where the named template leaves out what the tokenizer puts before text; else empty."""
        if not self.prefix_ids or "bos_token" in NAMED_TEMPLATES.get(self.given_template or "", "bos_token"):
            return ""
        first = self.backend.decode(list(self.prefix_ids), skip_special_tokens=False)
        return (
            f"data.chat_template={self.given_template}: rows do not begin with {first}, which this tokenizer "
            "puts before text; a server that adds it to chats (llama.cpp) asks otherwise than the rows do"
        )

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """Texts of special tokens, which the tokenizer never splits: `<|im_end|>`, `</s>` …"""
        added = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)


def load_tokenizer(folder: Path, chat_template: str | None = None, *, date: date | None = None) -> Tokenizer:
    """The tokenizer in `folder` (tokenizer.json, and tokenizer_config.json, chat_template.jinja … where
    present).

    `chat_template` (`data.chat_template` of the config) replaces that of the folder: a name, jinja text, a
    path, or `none`. `date`: today for templates that write the date. A resumed run passes the day of its
    start, since its tokens must not change at midnight. Raises UserError, with the name of the file, for a
    missing or broken file.
    """
    folder = Path(folder)
    files = _read_files(folder)
    facts, content = _loaded(folder, files)
    special: dict[str, str] = facts["special_tokens"]
    with _errors_of(folder):
        backend = tokenizers.Tokenizer.from_str(content)
    ids = {key: backend.token_to_id(text) for key, text in special.items()}
    eos_id = ids.get("eos_token")
    if eos_id is None:
        eos_id = next(iter(read_stop_ids(folder)), None)
    pad_id = next((i for i in (ids.get("pad_token"), eos_id) if i is not None), 0)
    with _errors_of(folder):
        prefix, suffix = _surroundings(backend)
        continuation = _continuation(backend, special)
    tokenizer = Tokenizer(
        backend=backend, folder=folder, special_tokens=special, bos_id=ids.get("bos_token"), eos_id=eos_id,
        pad_id=pad_id, prefix_ids=prefix, suffix_ids=suffix, template=None,
        alphabet=alphabet_of(json.loads(content), _added_texts(backend)),
        continuation=continuation, infill_token=facts["infill_token"],
    )  # fmt: skip
    where, sources = _own_templates(folder, files["tokenizer_config.json"])
    if chat_template is not None:
        return tokenizer.with_chat_template(chat_template, date=date)
    if not sources:
        return tokenizer
    template = ChatTemplate(sources, special, tokenizer.special_texts, where=where, date=date)
    return dataclasses.replace(tokenizer, template=template)


def _added_texts(backend: tokenizers.Tokenizer) -> set[str]:
    return {token.content for token in backend.get_added_tokens_decoder().values()}


def _read_files(folder: Path) -> dict[str, dict[str, Any]]:
    """The content of each of _FILES; empty for one that is missing."""
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
    todo = "copy it again from the checkpoint"
    files = {
        name: read_object(folder / name, max_bytes=_MAX_JSON_BYTES, todo=todo, missing={}) for name in _FILES
    }
    if not isinstance(files["tokenizer.json"].get("model"), dict):
        raise UserError(f"{path}: not a tokenizer file: it has no `model` section; {todo}")
    return files


def _loaded(folder: Path, files: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """What AutoTokenizer makes of a folder: facts of hf_process.py, and a tokenizer.json that says it all."""
    # It would read that of the listed files which fits its version, and it gets tokenizer.json alone.
    if files["tokenizer_config.json"].get("fast_tokenizer_files") not in (None, [], ["tokenizer.json"]):
        raise UserError(
            f"{folder / 'tokenizer_config.json'}: fast_tokenizer_files: transformers may read another file "
            "than tokenizer.json; remove the key"
        )
    with tempfile.TemporaryDirectory(prefix="lptune-") as place:
        for name in files:
            if files[name]:
                (Path(place) / name).symlink_to((folder / name).resolve())
        try:
            content = [read_bytes(folder / name, _MAX_JSON_BYTES) if files[name] else b"" for name in files]
            answer = hf.ask_once("load", content, cpu_s=_MAX_CPU_S, memory=MAX_MEMORY, folder=place)
            reason = answer.facts.get("message", "").replace(place, str(folder))
        except hf.EndedError as error:
            reason = str(error)
    if reason:
        raise UserError(
            f"{folder}: AutoTokenizer of transformers cannot load tokenizer.json and the files beside it: "
            f"{' '.join(reason.split()):.300}; copy them again from the checkpoint"
        )
    if answer.facts["splits_special"]:
        raise UserError(
            f"{folder / 'tokenizer_config.json'}: split_special_tokens: special tokens in text are not split "
            "here; remove the key"
        )
    return answer.facts, answer.bodies[0].decode()


@contextlib.contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    """Turns errors of `tokenizers` over a bad tokenizer.json into a UserError."""
    try:
        yield
    except BaseException as error:
        # The Rust side raises bare Exception, or panics: a BaseException whose class cannot be imported.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        # The place in the message refers to our own rendering of the file, so it is dropped.
        reason = re.sub(r" at line \d+ column \d+$", "", str(error))
        raise UserError(
            f"{folder / 'tokenizer.json'}: not a tokenizer that `tokenizers` can use: {reason}; copy it "
            "again from the checkpoint"
        ) from None


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
    if value:
        both = ("name", "template")
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(t, dict) and all(isinstance(t.get(key), str) for key in both) for t in items):
            raise UserError(
                f"{where}: chat_template: expected text or a list of {{name: …, template: …}}, found "
                f"{value!r:.60}; set data.chat_template"
            )
        named = {t["name"]: t["template"] for t in items}
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
    if value in NAMED_TEMPLATES:
        return {"default": NAMED_TEMPLATES[value]}
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
            f"data.chat_template: {value!r} is neither a jinja template nor an existing file, nor one of "
            f"{', '.join(NAMED_TEMPLATES)}{closest(path.name, [*NAMED_TEMPLATES, *names])}; give one of the "
            "three, or none"
        )
    return {"default": value}


def _read_text(path: Path, encoding: str) -> str:
    try:
        return read_text(path, MAX_SOURCE_CHARS, encoding)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from None


def check_same_tokens(tokenizer: Tokenizer, vocab_size: int, folder: Path, its_vocab_size: int) -> None:
    """Raises UserError unless the teacher in `folder` gives every token the same id as `tokenizer` does, and
    has as many words in its vocabulary. vocab_size, its_vocab_size: of config.json, which may pad them.
    """
    mine = tokenizer.backend.get_vocab(with_added_tokens=True)
    theirs = load_tokenizer(folder, "none").backend.get_vocab(with_added_tokens=True)
    for text in sorted(mine.keys() | theirs.keys()):
        if mine.get(text) != theirs.get(text):
            raise UserError(
                f"teacher.path: {folder} has another tokenizer than {tokenizer.folder}: token {text!r} has "
                f"the id {theirs.get(text, 'none')} there and {mine.get(text, 'none')} here; choose a "
                "teacher with the tokenizer of the student"
            )
    if vocab_size != its_vocab_size:
        raise UserError(
            f"teacher.path: {folder} has vocab_size {its_vocab_size} in config.json, the model in model.path "
            f"has {vocab_size}, so their logits do not fit together; choose a teacher with as many words"
        )
