"""An answer is learned behind the very tokens that generation gets, also where the tokenizer would join the
prompt's end and the answer's beginning into one token.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from lptune.config import DataConfig, PromptsConfig
from lptune.data import Prepared, PromptWriter, Tokenizer, load_tokenizer, prepare
from tests.helpers.chat_templates import CHATML, CHATML_MARKED, LLAMA3, MISTRAL

SPACED = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + ('<|im_end|>' if m.role == 'assistant' else '\n') "
    "}}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "marks": CHATML_MARKED, "spaced": SPACED, "mistral": MISTRAL, "llama3": LLAMA3}
ANSWERS = ["yes", "\n\nyes", "\nyes\n\n", " yes", "\tyes", "  \n yes", ") yes", "\r\nyes", "\u00a0yes"]
NUM_JOINED = {
    "byte_level": {"chatml": 2, "marks": 2, "spaced": 9},
    "gpt2": {"chatml": 1, "marks": 1, "spaced": 9, "llama3": 9},
    "spaces_in_words": {"chatml": 2, "marks": 2, "spaced": 9},
}
"""How many of the nine ANSWERS each tokenizer below joins with the prompt of each template."""
CORPUS = [f"user: hello\n\n\nassistant: \t yes) yes\n\n{text}\n" for text in ANSWERS] * 4
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def byte_level() -> Backend:
    """Splits texts as Qwen's and Llama 3's tokenizers do: line breaks stay together."""
    backend = Backend(models.BPE())
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def gpt2() -> Backend:
    """GPT-2's splitting: of white space before a word, the last character stands alone."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(["yes\n\n", *CORPUS], trainer)
    return backend


def spaces_in_words() -> Backend:
    """Puts a space before the text and joins it with the word, as sentencepiece does; Llama 2's spelling."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", *letters])
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@pytest.fixture(params=[byte_level, gpt2, spaces_in_words])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    backend: Backend = request.param()
    folder: Path = tmp_path / request.param.__name__
    folder.mkdir()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def learn(tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], **keys: Any) -> Prepared:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    cfg = DataConfig(source=str(path), seq_len=512, cache="none")
    return prepare(cfg, tokenizer, seed=0, vocab_size=1000, **keys)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_before_an_answer_are_those_of_generation(folder: Path, name: str) -> None:
    tokenizer = load_tokenizer(folder, TEMPLATES[name])
    assert tokenizer.template is not None
    writer = PromptWriter(PromptsConfig(), tokenizer, 1000)
    plain, num_joined = {"role": "assistant", "content": "yes"}, 0
    for answer in ANSWERS:
        user = {"role": "user", "content": "hello"}
        messages = [user, {"role": "assistant", "content": answer}, user, plain, user]
        messages = [*messages, {"role": "assistant", "content": answer}]
        prepared = learn(folder, tokenizer, {"messages": messages})
        start, stop = prepared.train.documents.place(0)
        tokens = prepared.train.documents.tokens_T[start:stop].tolist()
        is_target = prepared.train.documents.is_target_T[start:stop].tolist()
        whole = tokenizer.template.render(messages).text
        assert "".join(tokenizer.decode(tokens, skip_special=False).split()) == "".join(whole.split())
        first = is_target.index(True)
        assert tokens[:first] == writer.of_messages([user]), (answer, whole)
        joined = [line for line in prepared.report if "would join the beginning of" in line]
        assert len(joined) == (tokens != tokenizer.encode(whole, add_special=False)), answer
        num_joined += len(joined)
    assert num_joined == NUM_JOINED[folder.name].get(name, 0)


def test_both_answers_of_a_preference_stand_behind_the_same_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, CHATML)
    for answer in ANSWERS:
        row = {"prompt": "hello", "chosen": answer, "rejected": "no"}
        rows = learn(folder, tokenizer, row, preferences=True).train
        (chosen, _), (rejected, _) = (rows.prompt_and_answer(i) for i in range(2))
        assert chosen == rejected, answer
