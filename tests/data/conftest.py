"""Tokenizer folders made here, so that the data tests need no download: a byte-level BPE with every family's
special tokens.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from lptune.data import Tokenizer, load_tokenizer
from tests.helpers.chat_templates import config

SPECIAL_TOKENS = [
    "<|endoftext|>", "<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>",
    "<bos>", "<eos>",
]  # fmt: skip

CORPUS = [
    "What is the capital of France? The capital of France is Paris. user assistant system tool model",
    "Compute two plus two, please. Two plus two is four: 2 + 2 = 4.\n\nThank you! {\"name\": \"f\", "
    "\"arguments\": {}}",
    "Der schnelle braune Fuchs springt über den faulen Hund. Привет, мир. 你好，世界 🎉",
] * 4  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    """tokenizer.json of a byte-level BPE of some 600 tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)  # or transformers' masks miss tokens
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend.to_str()


@pytest.fixture(scope="session")
def asset_tokenizer(assets: Path) -> Callable[[str], Tokenizer]:
    """Loads a real tokenizer, once."""
    return cache(lambda name: load_tokenizer(assets / name))


@pytest.fixture
def tokenizer_folder(tmp_path: Path, tokenizer_json: str) -> Callable[..., Path]:
    """Makes a tokenizer folder; keyword arguments become tokenizer_config.json."""

    def make(name: str = "tokenizer", **config: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tokenizer.json").write_text(tokenizer_json)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture
def tokenizer(tokenizer_folder: Callable[..., Path]) -> Tokenizer:
    """Without a chat template."""
    return load_tokenizer(tokenizer_folder())


@pytest.fixture
def chat(tokenizer_folder: Callable[..., Path]) -> Tokenizer:
    """With the chat template of ChatML."""
    return load_tokenizer(tokenizer_folder(**config("chatml")))


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """`jsonl(row, …)` writes a file of rows and returns its path. A text is a line as it stands."""

    def write(*rows: Any, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def tokenizations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One element per time that a source was tokenized."""
    made, before = [], Tokenizer.encode_batch

    def encode_batch(self: Tokenizer, texts: Any, **keys: Any) -> Any:
        made.append(len(texts))
        return before(self, texts, **keys)

    monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
    return made
