"""Characters that a tokenizer drops.

Llama-class tokenizers have no unknown token in transformers: a character that is neither in the vocabulary
nor spelled by its byte tokens vanishes before the merges. Small vocabularies lack many. Tokens stay right,
but their character offsets drift from there on, and a mask built on them would slip. So such characters are
taken out of the text first, where they can be counted and named, and spans move along.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any


class Alphabet:
    """What can be spelled. Texts of special tokens pass whole, whatever they are made of."""

    def __init__(
        self, vocabulary: Mapping[str, int], special_texts: Iterable[str], *, byte_fallback: bool
    ) -> None:
        self._vocabulary = vocabulary
        self._byte_fallback = byte_fallback
        self._known: dict[str, bool] = {" ": "▁" in vocabulary}
        texts = sorted(filter(None, special_texts), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def knows(self, character: str) -> bool:
        """Whether `character` leaves a token."""
        if character not in self._known:
            spelled = self._byte_fallback and all(
                f"<0x{byte:02X}>" in self._vocabulary for byte in character.encode("utf-8", "surrogatepass")
            )
            self._known[character] = spelled or character in self._vocabulary
        return self._known[character]

    def unknown(self, text: str) -> list[int]:
        """Positions of the characters of `text` that leave no token."""
        missing = {character for character in set(text) if not self.knows(character)}
        if not missing:
            return []
        special = [match.span() for match in self._special.finditer(text)]
        places = [i for i, character in enumerate(text) if character in missing]
        return [i for i in places if not any(start <= i < stop for start, stop in special)]


def alphabet_of(spec: Mapping[str, Any], special_texts: Iterable[str]) -> Alphabet | None:
    """The alphabet of tokenizer.json `spec`, or None where no character can vanish."""
    model = spec["model"]
    byte_level = "ByteLevel" in json.dumps(spec.get("pre_tokenizer"))
    if model.get("type", "BPE") != "BPE" or model.get("unk_token") is not None or byte_level:
        return None
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)):
        return None
    return Alphabet(model["vocab"], special_texts, byte_fallback=bool(model.get("byte_fallback")))


def without(text: str, places: list[int], spans: list[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
    """`text` without the characters at `places` (ascending), and `spans` moved along."""
    removed = set(places)
    before = [0]
    for i in range(len(text)):
        before.append(before[-1] + (i in removed))
    kept = "".join(character for i, character in enumerate(text) if i not in removed)
    return kept, [(start - before[start], stop - before[stop]) for start, stop in spans]
