"""Finds the characters that a tokenizer drops silently, so that they can be counted.

Tokenizers of the Llama class have no unknown token in transformers: a character that is neither in the
vocabulary nor covered by byte tokens vanishes before the merges. Small vocabularies lack many characters. The
tokens stay right, but all later character offsets are shifted, and with them a mask that is built on offsets.
So such characters are removed from the text first. There they can be counted and named, and the spans of the
mask are moved along.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def _byte_letters() -> list[str]:
    """The printable letter by which byte-level BPE writes each of the 256 bytes."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_BYTE_LETTERS = _byte_letters()


class Alphabet:
    """The characters that the tokenizer knows. Texts of special tokens are known as a whole.

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
            data = character.encode("utf-8", "surrogatepass")
            if self._spelling == "bytes":
                known = all(_BYTE_LETTERS[byte] in self._vocabulary for byte in data)
            else:
                spelled = self._spelling == "fallback" and all(
                    f"<0x{byte:02X}>" in self._vocabulary for byte in data
                )
                known = spelled or character in self._vocabulary
            self._known[character] = known
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
        complete = all(letter in vocabulary for letter in _BYTE_LETTERS)
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
