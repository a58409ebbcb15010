"""Ids equal AutoTokenizer's on every real tokenizer; what is wrong with a folder is one line."""

import importlib
import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from lptune.base.errors import UserError
from lptune.data import Tokenizer, load_tokenizer
from tests.helpers import cold
from tests.helpers.documents import Load, Make
from tests.proofs import fuzz_tokenizers

FOLDERS = [
    "tokenizers/qwen2",
    "tokenizers/llama2",
    "tokenizers/mistral_chatml",
    "tokenizers/gpt2",
    "tokenizers/titan_2k",
    "models/story_llama",
]
CLASSES = (
    "TokenizersBackend", "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer", "LlamaTokenizer",
    "CodeLlamaTokenizer", "GemmaTokenizer", "GPT2Tokenizer", "CodeGenTokenizer", "GPTNeoXTokenizer",
    "Qwen2Tokenizer", "Qwen3_5Tokenizer", "BertTokenizer", "OursTokenizer",
)  # fmt: skip


@pytest.fixture(scope="session")
def real(assets: Path, asset_tokenizer: Load) -> dict[str, tuple[Tokenizer, object]]:
    return {
        name: (asset_tokenizer(name), transformers.AutoTokenizer.from_pretrained(assets / name))
        for name in FOLDERS
    }


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_equal_transformers(real: dict, assets: Path, name: str) -> None:
    ours, theirs = real[name]
    lines = (assets / "data" / "multilingual.txt").read_text().splitlines()
    for text in [*fuzz_tokenizers.TEXTS, *lines[:80], "\n".join(lines[400:800])]:
        for special in (True, False):
            assert ours.encode(text, add_special=special) == theirs.encode(
                text, add_special_tokens=special
            ), text
    batch = [encoding.ids for encoding in ours.encode_batch(lines)]
    assert batch == theirs(lines, add_special_tokens=False)["input_ids"]
    fast = [encoding.ids for encoding in ours.encode_batch(lines, offsets=False)]
    assert fast == batch


@pytest.mark.parametrize("name", FOLDERS)
def test_special_tokens_equal_transformers(real: dict, name: str) -> None:
    ours, theirs = real[name]
    assert (ours.bos_id, ours.vocab_size) == (theirs.bos_token_id, len(theirs))
    if theirs.eos_token_id is not None:
        assert ours.eos_id == theirs.eos_token_id
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.encode("x") == [*ours.prefix_ids, *ours.encode("x", add_special=False), *ours.suffix_ids]


def test_every_class_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    sources = {"bytes": tmp_path / "bytes", "pieces": tmp_path / "pieces"}
    for name, backend in (("bytes", fuzz_tokenizers.byte_level()), ("pieces", fuzz_tokenizers.pieces())):
        sources[name].mkdir()
        backend.save(str(sources[name] / "tokenizer.json"))
    different: list[str] = []
    counts = fuzz_tokenizers.compare_all(sources, CLASSES, tmp_path, different.append, step=3)
    assert not different
    assert counts["equal"] > 25
    assert counts["refused"] < 12


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"split_special_tokens": True}, "split_special_tokens: "),
        ({"fast_tokenizer_files": ["tokenizer.4.0.json"]}, "fast_tokenizer_files: "),
        ({"tokenizer_class": "LukeTokenizer"}, "LukeTokenizer"),
        ({"tokenizer_class": "ByT5Tokenizer"}, "ByT5Tokenizer does not read tokenizer.json"),
        ({"tokenizer_class": "LlamaForCausalLM"}, "cannot load"),
    ],
)
def test_a_class_that_does_more_or_other_than_tokenizer_json_is_refused(
    tokenizer_folder: Make, config: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(tokenizer_folder(**config))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_would_take_all_memory_is_refused(
    tokenizer_folder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # To fill the limit of a run takes 17 seconds.
    monkeypatch.setattr(importlib.import_module("lptune.data.tokenizer"), "MAX_MEMORY", 512 * 2**20)
    folder = tokenizer_folder(tokenizer_class="T5Tokenizer", extra_ids=2_000_000_000)
    with pytest.raises(UserError, match="cannot load") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_code_llamas_infilling_text_is_refused(tmp_path: Path) -> None:
    fuzz_tokenizers.pieces().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CodeLlamaTokenizer"}')
    tokenizer = load_tokenizer(tmp_path)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(UserError, match="a text holds <FILL_ME>, at which transformers splits it"):
            encode("def f(x):<FILL_ME>return x")


def test_a_byte_order_mark_is_written_where_transformers_writes_it(
    tokenizer_folder: Make, tmp_path: Path
) -> None:
    folder = tokenizer_folder()
    (folder / "chat_template.jinja").write_text("\ufeff{{ messages[0].content }}")
    messages = [{"role": "user", "content": "x"}]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(messages, tokenize=False)
    assert load_tokenizer(folder).render_chat(messages) == expected == "\ufeffx"
    # An editor's mark in a file of the user's own is none of the conversation.
    own = load_tokenizer(folder, str(folder / "chat_template.jinja"))
    assert own.render_chat(messages) == "x"
    assert own.chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize("name", ["id_rsa", "notes.txt", "link.jinja"])
def test_a_file_that_is_not_named_a_template_is_not_read_as_one(
    name: str, tokenizer_folder: Make, tmp_path: Path
) -> None:
    secret = tmp_path / ("target" if name == "link.jinja" else name)
    secret.write_text("s3cret")
    if name == "link.jinja":
        (tmp_path / name).symlink_to(secret)
    with pytest.raises(
        UserError, match=r"is exported with the model, so its name must end in \.jinja"
    ) as raised:
        load_tokenizer(tokenizer_folder(), str(tmp_path / name))
    assert "s3cret" not in str(raised.value)


def test_the_eos_token_falls_back_on_generation_and_model_config(
    tokenizer_folder: Make,
) -> None:
    folder = tokenizer_folder(eos_token=None)
    assert load_tokenizer(folder).eos_id is None
    (folder / "config.json").write_text('{"eos_token_id": 8}')
    assert load_tokenizer(folder).eos_id == 8
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (3, 3)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.special_tokens == theirs.special_tokens_map == {}  # a chat template sees no eos_token


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "tokenizer.json: not found, and no other tokenizer file"),
        ({"tokenizer.model": "x"}, "tokenizer.json: not found, only tokenizer.model; convert it"),
        ({"tokenizer.json": "{"}, "tokenizer.json: line 1: not valid JSON"),
        ({"tokenizer.json": "[]"}, "expected a JSON object, found list"),
        ({"tokenizer.json": "{}"}, "no `model` section"),
        (
            {"tokenizer.json": '{"model": {"type": "BPE", "vocab": 3}}'},
            "AutoTokenizer of transformers cannot",
        ),
        ({"tokenizer_config.json": "\x00"}, "tokenizer_config.json: line 1: not valid JSON"),
        ({"tokenizer_config.json": "\ufeff{}"}, "tokenizer_config.json: line 1: not valid JSON"),
        ({"tokenizer_config.json": '{"eos_token": "\\ud83d"}'}, "surrogates not allowed; copy them again"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": {"1": 3}}'}, "should be a dictionary or"),
        ({"tokenizer_config.json": '{"chat_template": "{% if %}"}'}, "line 1: not a jinja template"),
        (
            {"tokenizer_config.json": '{"chat_template": [{"name": "rag", "template": "x"}]}'},
            "no chat template named 'default' (found rag)",
        ),
        ({"chat_template.jinja": b"\xff\xfe"}, "chat_template.jinja: cannot be read as UTF-8"),
    ],
)
def test_a_broken_folder_is_one_line_naming_the_file(
    tmp_path: Path, tokenizer_json: str, files: dict, message: str
) -> None:
    if files and not {"tokenizer.json", "tokenizer.model"} & files.keys():
        (tmp_path / "tokenizer.json").write_text(tokenizer_json)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        load_tokenizer(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_configs_chat_template_is_text_or_a_path_or_none(tokenizer_folder: Make, tmp_path: Path) -> None:
    folder = tokenizer_folder(chat_template="{{ 'own' }}")
    path = tmp_path / "mine.jinja"
    path.write_text("{{ 'file' }}")
    for given_template, text in ((None, "own"), ("{{ 'text' }}", "text"), (str(path), "file")):
        assert load_tokenizer(folder, given_template).render_chat([{"role": "user", "content": ""}]) == text
    assert load_tokenizer(folder, "none").template is None
    assert load_tokenizer(folder).with_chat_template("none").chat_template is None
    with pytest.raises(
        UserError, match=r"data.chat_template: .*mine.jina' is neither .*did you mean 'mine.jinja'"
    ):
        load_tokenizer(folder, str(tmp_path / "mine.jina"))
    with pytest.raises(UserError, match=r"set data.chat_template"):
        load_tokenizer(folder, "none").render_chat([])


def test_characters_that_vanish_are_found_and_positions_follow(
    asset_tokenizer: Load,
) -> None:
    tokenizer = asset_tokenizer("models/story_llama")
    assert tokenizer.alphabet is not None
    text = "ab/cd = 5%<|end_story|>ïx"
    places = tokenizer.alphabet.unknown(text)
    assert [text[i] for i in places] == ["/", "=", "%", "ï"]
    kept, spans = tokenizer.alphabet.without(text, places, [(3, 5), (10, 23)])
    assert [kept[a:b] for a, b in spans] == ["cd", "<|end_story|>"]
    assert tokenizer.encode(kept, add_special=False) == tokenizer.encode(text, add_special=False)
    encoding = tokenizer.backend.encode(kept, add_special_tokens=False)
    assert encoding.offsets[-1][1] == len(kept)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("abcé/=% <>|\nTheï_"), max_size=30))
def test_removing_unknown_characters_changes_no_token(asset_tokenizer: Load, text: str) -> None:
    tokenizer = asset_tokenizer("models/story_llama")
    assert tokenizer.alphabet is not None
    kept, _ = tokenizer.alphabet.without(text, tokenizer.alphabet.unknown(text), [])
    assert tokenizer.encode(kept, add_special=False) == tokenizer.encode(text, add_special=False)


def test_a_continuation_is_tokenized_as_in_the_middle_of_a_text(
    asset_tokenizer: Load,
) -> None:
    tokenizer = asset_tokenizer("tokenizers/llama2")
    ids = tokenizer.encode_batch([tokenizer.continuation + "Paris"])[0].ids[1:]
    assert tokenizer.decode([*tokenizer.encode("It is:\n"), *ids]) == "It is:\nParis"
    assert asset_tokenizer("tokenizers/qwen2").continuation == ""


def test_a_tokenizer_saved_by_tokenizers_alone_loads(tmp_path: Path, tokenizer_json: str) -> None:
    tokenizers.Tokenizer.from_str(tokenizer_json).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.template) == (None, None, 0, None)


def test_byte_level_tokenizers_that_lack_bytes_say_so(asset_tokenizer: Load) -> None:
    alphabet = asset_tokenizer("tokenizers/titan_2k").alphabet
    assert alphabet is not None
    assert alphabet.unknown("a b<|im_end|>\nü") == [1, 13, 14]
    for name in ("qwen2", "gpt2", "llama2"):
        assert asset_tokenizer(f"tokenizers/{name}").alphabet is None


def test_a_panic_is_one_line(tokenizer_folder: Make) -> None:
    tokenizer = load_tokenizer(tokenizer_folder())
    tokenizer.backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(UserError, match="retry-limit-in-match over"):
            encode("a" * 40 + "c")


@pytest.mark.parametrize("fault", ["raise RuntimeError('bad ABI')", "import os; os._exit(3)"])
def test_a_broken_installation_is_not_taken_for_a_broken_checkpoint(
    tokenizer_folder: Make, tmp_path: Path, fault: str
) -> None:
    folder, package = tokenizer_folder(), tmp_path / "broken" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(fault)
    program = (
        "from pathlib import Path; from lptune import data\n"
        f"try: data.load_tokenizer(Path({str(folder)!r}))\n"
        "except Exception as error: print(error)\n"
    )
    path = f"{package.parent}:{cold.environment().get('PYTHONPATH', '')}"
    said = cold.run("-c", program, PYTHONPATH=path, XDG_CACHE_HOME=str(tmp_path)).stdout
    assert "RuntimeError: bad ABI; pip install" in said if "ABI" in fault else "reads it (3)" in said


def test_no_process_that_loads_renders_and_reads_cached_rows_imports_transformers(
    tokenizer_folder: Make, tmp_path: Path
) -> None:
    folder = tokenizer_folder(chat_template="{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    row = {"messages": [{"role": "user", "content": "x" * 2000}, {"role": "assistant", "content": "y"}]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 600)  # long enough for the cache
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "started = []\n"
        "sys.addaudithook(lambda event, _: started.append(event) if event == 'subprocess.Popen' else None)\n"
        "from lptune import data\n"
        "from lptune.config import DataConfig\n"
        f"cfg = DataConfig(source={str(tmp_path / 'rows.jsonl')!r}, cache={str(tmp_path / 'cache')!r})\n"
        f"tokenizer = data.load_tokenizer(Path({str(folder)!r}))\n"
        "print(data.prepare(cfg, tokenizer, seed=1, vocab_size=100_000).train.digest)\n"
        "print([name for name in ('transformers', 'jinja2') if name in sys.modules], len(started))\n"
    )
    own = {"XDG_CACHE_HOME": str(tmp_path / "own")}
    making, reading = (cold.run("-c", program, **own) for _ in range(2))
    assert making.returncode == 0, making.stderr
    (digest, *imported, num_started), second = making.stdout.split(), reading.stdout.split()
    assert (imported, num_started) == (["[]"], "1")
    assert second == [digest, "[]", "0"], "the second process starts none"
    assert list((tmp_path / "cache").glob("*/manifest.json"))


def test_a_damaged_answer_of_transformers_is_asked_for_again(
    tokenizer_folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tokenizer_folder()
    first = load_tokenizer(folder)
    for kept in (tmp_path / "lptune" / "transformers").iterdir():
        kept.write_bytes(kept.read_bytes().replace(b"endoftext", b"otherwise"))
    assert load_tokenizer(folder).special_tokens == first.special_tokens
