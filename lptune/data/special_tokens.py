"""The tokens that a folder adds to its vocabulary, and the names of some of them (`bos_token` …).

Up to four files list them, and contradict each other: tokenizer.json, tokenizer_config.json, and in older
folders special_tokens_map.json and added_tokens.json. The order of the files decides the ids of tokens that
the vocabulary lacks. The last file that names a token decides its flags (`lstrip`, `normalized` …), which
also change ids. Order and flags follow transformers.
"""

from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from lptune.data.tokenizer_classes import Spec, TokenizerClass

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Token = str | AddedToken


class SpecialTokens(NamedTuple):
    """The special and added tokens of a folder, in the order of transformers."""

    named: dict[str, Token]
    extra: list[Token]
    """Special tokens that have no name."""
    added: list[AddedToken]
    """All tokens outside of the plain vocabulary, special or not, sorted by id."""

    @property
    def texts(self) -> dict[str, str]:
        """`bos_token`, `eos_token` … -> text: the variables of a chat template."""
        return {name: str(token) for name, token in self.named.items()}

    def register(self, backend: tokenizers.Tokenizer, resets_flags: bool) -> None:
        """Adds all tokens to `backend`."""
        tokens: list[Token] = list(self.added)
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        known |= {str(token) for token in tokens}
        for token in (*self.named.values(), *self.extra):
            if str(token) not in known and token not in tokens:
                tokens.append(token)
        names = set(self.texts.values())
        backend.add_tokens([_special(token, names) for token in tokens])
        if resets_flags:
            texts = dict.fromkeys([*self.texts.values(), *map(str, self.extra)])
            backend.add_tokens([AddedToken(text, special=True) for text in texts])


def special_tokens(spec: Spec, files: dict[str, Spec], kind: TokenizerClass) -> SpecialTokens:
    """The tokens of a folder. `spec` is tokenizer.json; `files` holds tokenizer_config.json and the others by
    name. Raises TypeError and ValueError for entries that are not tokens.
    """
    config = dict(files["tokenizer_config.json"])
    if "additional_special_tokens" in config and not config.get("extra_special_tokens"):
        config["extra_special_tokens"] = config.pop("additional_special_tokens")
    own = {
        key: value
        for key, value in config.items()
        if key not in NAMED and key.endswith("_token") and isinstance(value, str)
    }
    _move_dict(config, own)
    added: dict[int, AddedToken] = {}
    by_text: dict[str, AddedToken] = {}

    def add(number: Any, token: AddedToken) -> None:
        added[int(number)] = by_text[token.content] = token

    if "added_tokens_decoder" in config:
        for number, entry in (config["added_tokens_decoder"] or {}).items():
            add(number, AddedToken(**entry))
    else:
        for key, value in files["special_tokens_map.json"].items():
            if isinstance(value, dict) and key != "extra_special_tokens":
                value = AddedToken(**{**value, "special": True})
            elif isinstance(value, list) and key == "extra_special_tokens":
                value = [*(config.get(key) or []), *value]
            config[key] = value
        _move_dict(config, own)
        special = {str(token) for key in NAMED if (token := _token(config.get(key))) is not None}
        special |= {str(_token(token)) for token in config.get("extra_special_tokens") or []}
        for text, number in files["added_tokens.json"].items():
            is_special = text in special
            add(number, AddedToken(text, normalized=not is_special, special=is_special))
        for entry in spec.get("added_tokens") or []:
            add(entry["id"], AddedToken(**{key: value for key, value in entry.items() if key != "id"}))

    if "additional_special_tokens" in config:
        config.setdefault("extra_special_tokens", config["additional_special_tokens"])
    named: dict[str, Token] = {}
    for key in (*NAMED, *(key for key in kind.special_tokens if key not in NAMED)):
        token = _token(config[key]) if key in config and key not in own else kind.special_tokens.get(key)
        if token is not None:
            named[key] = by_text.get(str(token), token) if key in NAMED else token
    named |= {key: token for key, value in own.items() if (token := _token(value)) is not None}
    extra = config.get("extra_special_tokens") or []
    if "extra_special_tokens" not in config:
        extra = list(kind.extra_special_tokens)
    tokens = [token for entry in extra if (token := _token(entry)) is not None]
    return SpecialTokens(named, tokens, [added[number] for number in sorted(added)])


def _move_dict(config: Spec, own: dict[str, Any]) -> None:
    """Moves extra special tokens that have a name to the named ones, like `bos_token`."""
    if isinstance(config.get("extra_special_tokens"), dict):
        own.update(config.pop("extra_special_tokens"))


def _token(value: Any) -> Token | None:
    if isinstance(value, dict):
        value = AddedToken(**{key: flag for key, flag in value.items() if key != "__type"})
    return value if isinstance(value, AddedToken) else (value if isinstance(value, str) and value else None)


def _special(token: Token, names: set[str]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if not token.special and token.content in names:
        token.special = True
    return token
