"""Several sources: each as often as its weight says, evaluation once, the tokens where they are."""

import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lptune.base.errors import UserError
from lptune.config import DataConfig, SourceConfig
from lptune.data import Loader, Prepared, Rows, Tokenizer, cache, load_tokenizer, prepare
from lptune.data import documents as documents_module
from lptune.data.documents import Joined, joined
from lptune.data.order import weighted
from tests.helpers.chat_templates import CHATML, config
from tests.helpers.documents import Make, Write, numbered

SUMS = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}."} for i in range(40)]
NAMES = [{"instruction": f"Name number {i}", "output": "Paris" * (1 + i % 5)} for i in range(31)]


@pytest.fixture
def write(jsonl: Write) -> Callable[..., str]:
    return lambda name, rows: jsonl(*rows, name=name)


@pytest.fixture
def sources(write: Write) -> tuple[str, str]:
    return write("sums.jsonl", SUMS), write("names.jsonl", NAMES)


def run(source: Any, tokenizer: Tokenizer, *, seed: int = 0, **keys: Any) -> Prepared:
    source = tuple(source) if isinstance(source, list) else source
    values = {"seq_len": 64, "cache": "none", **keys}
    if "chat_template" in keys:
        tokenizer = tokenizer.with_chat_template(keys["chat_template"])
    return prepare(DataConfig(source=source, **values), tokenizer, seed=seed, vocab_size=600)


def entry(source: str, **keys: Any) -> SourceConfig:
    return SourceConfig(source=source, **keys)


def prompts(rows: Rows | None, tokenizer: Tokenizer) -> Counter[str]:
    """How many documents there are of each prompt."""
    assert rows is not None
    return Counter(tokenizer.decode(rows.prompt_and_answer(i)[0]).strip() for i in range(rows.num_documents))


QUESTIONS = {row["question"] for row in SUMS}
INSTRUCTIONS = {row["instruction"] for row in NAMES}


def test_a_list_a_folder_a_glob_and_one_file_of_the_same_rows_train_alike(
    write: Write, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    whole = write("whole.jsonl", SUMS)
    parts = [write("shards/a.jsonl", SUMS[:7]), write("shards/b.jsonl", SUMS[7:])]
    for keys in ({}, {"eval_fraction": 0.3}, {"packing": False}):
        expected = run(whole, tokenizer, **keys)
        for source in (parts, str(tmp_path / "shards"), str(tmp_path / "shards/?.jsonl"), [whole]):
            found = run(source, tokenizer, **keys)
            assert found.train.digest == expected.train.digest
            assert (found.evaluation is None) == (expected.evaluation is None)
            if found.evaluation and expected.evaluation:
                assert found.evaluation.digest == expected.evaluation.digest
            batch, other = (one.train.batch(range(one.train.num_rows)) for one in (found, expected))
            assert all((a == b).all() for a, b in zip(batch[:5], other[:5], strict=True))
    assert run(str(tmp_path / "shards"), tokenizer).report[0] == (
        f"{tmp_path}/shards: 40 rows of 2 files as pairs (prompt: question, response: answer), plain layout"
    )


def test_weights_two_and_a_half_give_exactly_that_many_documents(
    sources: tuple[str, str], tokenizer: Tokenizer
) -> None:
    sums, names = sources
    found = prompts(run([entry(sums, weight=2), entry(names, weight=0.5)], tokenizer).train, tokenizer)
    assert {question: found[question] for question in QUESTIONS} == dict.fromkeys(QUESTIONS, 2)
    assert sorted(found[name] for name in INSTRUCTIONS) == [0] * 15 + [1] * 16  # round(15.5) is even
    found = prompts(run([entry(sums, weight=2.5), names], tokenizer).train, tokenizer)
    assert sorted(found[question] for question in QUESTIONS) == [2] * 20 + [3] * 20
    assert {found[name] for name in INSTRUCTIONS} == {1}
    found = prompts(run([entry(sums, weight=2)], tokenizer).train, tokenizer)
    assert set(found.values()) == {2}


def test_the_report_gives_the_share_of_each_source(sources: tuple[str, str], tokenizer: Tokenizer) -> None:
    sums, names = sources
    prepared = run([entry(sums, weight=2), names], tokenizer)
    alone = {source: run(source, tokenizer).train.num_tokens for source in sources}
    twice, once = 2 * alone[sums], alone[names]
    total = prepared.train.num_tokens
    assert twice + once == total
    assert [line for line in prepared.report if line.startswith("mixture: ")] == [
        f"mixture: 80 documents, {twice:,} tokens ({twice / total:.1%}) of {sums}, weight 2",
        f"mixture: 31 documents, {once:,} tokens ({once / total:.1%}) of {names}, weight 1",
    ]  # fmt: skip
    assert [line.partition(":")[0] for line in prepared.report] == [sums, names, *["mixture"] * 2, "training"]
    assert not any(line.startswith("mixture") for line in run([sums], tokenizer).report)


def test_no_prompt_of_any_source_stands_on_both_sides_and_evaluation_sees_each_document_once(
    write: Write, tokenizer: Tokenizer
) -> None:
    in_both = {row["question"] for row in SUMS[:20]}
    other = write("other.jsonl", [{**row, "answer": "No idea."} for row in SUMS[:20]])
    listed = [entry(write("sums.jsonl", SUMS), weight=3), entry(other, weight=0.5)]
    unweighted = [source.source for source in listed]
    for seed in range(5):
        prepared = run(listed, tokenizer, eval_fraction=0.25, seed=seed)
        plain = run(unweighted, tokenizer, eval_fraction=0.25, seed=seed)
        assert prepared.evaluation is not None
        assert plain.evaluation is not None
        train, held_out = prompts(prepared.train, tokenizer), prompts(prepared.evaluation, tokenizer)
        assert not train.keys() & held_out.keys()
        assert held_out.total() == 15
        assert held_out == Counter({prompt: 1 + (prompt in in_both) for prompt in held_out})
        assert plain.evaluation.digest == prepared.evaluation.digest
        assert plain.train.num_documents == 45


def test_evaluation_sources_are_a_list_too(sources: tuple[str, str], tokenizer: Tokenizer) -> None:
    sums, names = sources
    prepared = run([entry(sums, weight=2)], tokenizer, eval_source=(names, entry(sums)))
    assert prompts(prepared.evaluation, tokenizer) == Counter({*QUESTIONS, *INSTRUCTIONS})
    assert f"note: 40 of 71 documents of {names}, {sums} have a prompt of {sums}" in prepared.report
    with pytest.raises(UserError, match=rf"data.eval_source: {names} is read twice"):
        run(sums, tokenizer, eval_source=(names, names))
    Path(names).write_text("")
    with pytest.raises(UserError, match=r"names.jsonl: is empty; give data.eval_source rows"):
        run(sums, tokenizer, eval_source=names)


def test_a_text_beside_other_sources_is_held_out_in_chunks(
    write: Write, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    text = tmp_path / "book.txt"
    text.write_text("\n".join(f"Line {i} of the book." for i in range(500)))
    sums = write("sums.jsonl", SUMS)
    prepared = run([sums, str(text)], tokenizer, eval_fraction=0.2)
    assert prepared.evaluation is not None
    found = prompts(prepared.evaluation, tokenizer)
    num_chunks = run(str(text), tokenizer).train.num_documents
    assert sum(prompt not in QUESTIONS for prompt in found) == pytest.approx(0.2 * num_chunks, abs=12)
    # Of a text that stands in two sources no chunk may stand on both sides.
    copied = str(shutil.copy(text, tmp_path / "copy.txt"))
    with pytest.raises(UserError, match="documents with one and the same prompt"):
        run([str(text), copied], tokenizer, eval_fraction=0.2)


def test_a_resumed_run_and_two_ranks_see_the_batches_of_one(
    sources: tuple[str, str], tokenizer: Tokenizer
) -> None:
    listed = [entry(sources[0], weight=2.5), entry(sources[1], weight=0.5)]
    keys: dict[str, Any] = {"seed": 3, "global_batch_size": 4, "micro_batch_size": 2}
    one = Loader(run(listed, tokenizer, seed=3).train, **keys)
    steps = range(one.num_steps(2))
    assert len(steps) > 6
    expected = [one.micro_batches(step) for step in steps]
    resumed = Loader(run(listed, tokenizer, seed=3).train, **keys)  # another process prepares again
    ranks = [
        Loader(run(listed, tokenizer, seed=3).train, rank=rank, num_ranks=2, **keys) for rank in range(2)
    ]
    for step in steps:
        of_ranks = [batch for rank in ranks for batch in rank.micro_batches(step)]
        for found in (resumed.micro_batches(step), of_ranks):
            for batch, other in zip(found, expected[step], strict=True):
                assert all((a == b).all() for a, b in zip(batch[:5], other[:5], strict=True))
    for seed, weight in ((4, 2.5), (3, 2)):
        changed = run([entry(sources[0], weight=weight), listed[1]], tokenizer, seed=seed)
        assert changed.train.digest != one.rows.digest  # which a resume refuses


def test_each_source_has_a_cache_entry_that_other_weights_and_lists_reuse(
    sources: tuple[str, str], tmp_path: Path, tokenizer: Tokenizer, tokenizations: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(cache, "MIN_BYTES", 0)
    folder = tmp_path / "cache"
    sums, names = sources
    listed = [entry(sums, weight=2), entry(names, weight=0.5)]
    cold = run(listed, tokenizer, cache=str(folder))
    num_calls = len(tokenizations)
    warm = run(listed, tokenizer, cache=str(folder))
    for source in ([names, entry(sums, weight=3)], names, [names, sums]):
        run(source, tokenizer, cache=str(folder), eval_fraction=0.1)
    assert len(tokenizations) == num_calls
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 2
    assert cold.train.digest == warm.train.digest == run(listed, tokenizer).train.digest
    tokens_T = warm.train.documents.tokens_T
    assert isinstance(tokens_T, Joined)
    assert not any(array.flags.writeable for array in tokens_T._arrays)  # they are the mapped files


def test_a_folders_entry_is_made_anew_when_a_file_is_added_changed_or_renamed(
    write: Write, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MIN_BYTES", 0)
    folder, entries = tmp_path / "shards", tmp_path / "cache"

    def run_again() -> int:
        run(str(folder), tokenizer, cache=str(entries))
        return len([path for path in entries.iterdir() if path.is_dir()])

    write("shards/a.jsonl", SUMS[:5])
    assert run_again() == run_again() == 1
    write("shards/b.jsonl", SUMS[5:])
    assert run_again() == 2
    write("shards/b.jsonl", SUMS[6:])
    assert run_again() == 3
    (folder / "b.jsonl").rename(folder / "c.jsonl")  # the report names the places of bad rows
    assert run_again() == 4
    (folder / "README.md").write_text("x")
    assert run_again() == 4
    prepared = run(str(folder), tokenizer, cache=str(entries))
    assert f"note: not read in {folder}: README.md" in prepared.report


def test_a_source_of_a_list_may_be_read_in_its_own_way(write: Write, tokenizer_folder: Make) -> None:
    tokenizer = load_tokenizer(tokenizer_folder(**config("chatml")))
    chats = [
        {"messages": [{"role": "user", "content": f"u{i}"}, {"role": "assistant", "content": "a"}]}
        for i in range(3)
    ]
    odd = [{"frage": f"q{i}", "antwort": "a", "text": "t"} for i in range(3)]
    listed = [
        write("chats.jsonl", chats),
        entry(write("odd.jsonl", odd), prompt_column="frage", response_column="antwort", system_prompt="Be."),
        entry(write("text.jsonl", odd[:1]), format="text"),
    ]
    prepared = run(listed, tokenizer, chat_template=CHATML, max_rows=2)
    read_as = [
        line.partition(" rows as ")[2].partition(",")[0] for line in prepared.report if " rows as " in line
    ]
    assert [kind.split()[0] for kind in read_as] == ["chat", "pairs", "text"]
    assert prepared.train.num_documents == 2 + 2 + 1  # max_rows is of each source
    found = prompts(prepared.train, tokenizer)
    assert sum("Be." in prompt for prompt in found) == 2
    remedy = r"\(or set it in those entries of data.source that need it\)"
    with pytest.raises(UserError, match=rf"chats.jsonl has no column 'frage'.* {remedy}"):
        run(listed, tokenizer, chat_template=CHATML, prompt_column="frage")
    with pytest.raises(UserError, match=r"text.jsonl is raw text, which has none \(or set it in those"):
        run(listed, tokenizer, chat_template=CHATML, system_prompt="Be.")


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"prompt_column": "zz"}, r"data.source\[1\].prompt_column: \S+ has no column 'zz'.*: q, r"),
        ({"format": "chat"}, r"set data.messages_column \(or set it in data.source\[1\]\)"),
        ({}, r"its columns: q, r \(or set it in data.source\[1\]\)"),
    ],
)  # fmt: skip
def test_an_error_of_an_entrys_key_names_the_entry(
    sources: tuple[str, str], tokenizer: Tokenizer, tmp_path: Path, keys: dict[str, str], line: str
) -> None:
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"q": "a", "r": "b"}\n')
    with pytest.raises(UserError, match=f"{line}$"):
        run([sources[0], entry(str(odd), **keys)], tokenizer)


def test_an_error_of_a_folders_columns_names_the_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    with pytest.raises(UserError, match=r"a.jsonl, \S+b.jsonl\) has no column 'zz'"):
        run(str(tmp_path), tokenizer, prompt_column="zz")
    texts = tmp_path / "two words"
    texts.mkdir()
    for name in ("my notes.txt", "b.txt"):  # whole files have no number of a line
        (texts / name).write_text("a b c")
    with pytest.raises(UserError, match=r"two words/b.txt, \S+two words/my notes.txt\)"):
        run(str(texts), tokenizer, prompt_column="zz")


def test_a_weight_that_leaves_nothing_of_a_source_is_one_line(
    sources: tuple[str, str], tokenizer: Tokenizer
) -> None:
    with pytest.raises(
        UserError, match=r"data.source\[1\].weight: 0.01 of the 31 documents of .* selects none"
    ):
        run([sources[0], entry(sources[1], weight=0.01)], tokenizer)


@given(st.integers(0, 200), st.floats(0.001, 20), st.integers(0, 3), st.integers(0, 3))
def test_weights_are_exact(count: int, weight: float, seed: int, source: int) -> None:
    numbers_N = np.arange(1000, 1000 + count)
    found = Counter(weighted(numbers_N, weight, seed, source).tolist())
    assert found.keys() <= set(numbers_N.tolist())
    assert all(found[number] in (math.floor(weight), math.floor(weight) + 1) for number in numbers_N.tolist())
    assert abs(found.total() - weight * count) <= 0.5 + 1e-6 * count


def test_the_share_is_uniform_and_another_one_for_each_source() -> None:
    numbers_N, seeds = np.arange(100), range(400)
    chosen = np.array([np.bincount(weighted(numbers_N, 0.5, seed, 0), minlength=100) for seed in seeds])
    deviations = np.abs(chosen.mean(0) - 0.5) / math.sqrt(0.25 / len(seeds))
    assert deviations.max() < 4.5
    assert len({weighted(numbers_N, 0.5, 0, source).tobytes() for source in range(10)}) == 10


@given(st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_joined_documents_are_those_of_one_array(lengths: list[list[int]], data: st.DataObject) -> None:
    parts = [numbered(own, 100 * i) for i, own in enumerate(lengths)]
    found = joined(parts)
    tokens_T = np.concatenate([part.tokens_T for part in parts])
    numbers = data.draw(st.lists(st.integers(0, found.num_documents - 1), max_size=12))
    for some in (found, found.select(np.array(numbers, dtype=np.int64))):
        pieces = [*some.end_to_end(some.tokens_T), np.zeros(0, np.int32)]
        places = [some.place(i) for i in range(some.num_documents)]
        expected = [tokens_T[start:stop] for start, stop in places]
        assert np.concatenate(pieces).tolist() == [token for own in expected for token in own.tolist()]
        for (start, stop), own in zip(places, expected, strict=True):
            assert np.array_equal(some.tokens_T[start:stop], own)
            assert some.num_targets_N[places.index((start, stop))] == some.is_target_T[start:stop].sum()


@pytest.mark.parametrize("piece", [2, 3, 4])
def test_a_document_that_reaches_over_the_last_piece_is_read_once(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 + 4 tokens: the last document begins in one piece and ends in another."""
    monkeypatch.setattr(documents_module, "PIECE_TOKENS", piece)
    found = joined([numbered([2, 3]), numbered([4], 5)])
    assert np.concatenate([*found.end_to_end(found.tokens_T)]).tolist() == list(range(9))


def test_each_token_of_a_batch_knows_its_source_and_targets_are_counted_by_source(
    sources: tuple[str, str], tokenizer: Tokenizer
) -> None:
    listed = [entry(sources[0], weight=2.5), entry(sources[1])]
    train, held_out, _ = run(listed, tokenizer, eval_fraction=0.2)
    assert held_out is not None
    for rows in (train, held_out):
        assert rows.num_sources == 2
        batch = rows.batch(range(rows.num_rows))
        found = Counter[int]()
        for b in range(rows.num_rows):
            for i, number in enumerate(rows.packing.row(b).tolist()):
                here = batch.document_BS[b] == i
                of_sums = tokenizer.decode(rows.prompt_and_answer(number)[0]).strip() in QUESTIONS
                source = 0 if of_sums else 1
                assert (batch.source_BS[b][here] == source).all()
                found[source] += int((batch.labels_BS[b][here] != -100).sum())
        assert rows.num_targets_by_source(range(rows.num_rows)) == [found[0], found[1]]
        assert sum(found.values()) == batch.num_targets == rows.num_target_tokens
    turns = held_out.in_turns(range(held_out.num_documents))
    assert sorted(turns) == list(range(held_out.num_documents))
    of_sums = [
        tokenizer.decode(held_out.prompt_and_answer(number)[0]).strip() in QUESTIONS for number in turns
    ]
    assert of_sums[:4] == [True, False, True, False]
    loader = Loader(train, seed=3, global_batch_size=4, micro_batch_size=2)
    assert sum(loader.num_targets_by_source(1)) == loader.num_targets(1)
    alone, _, _ = run(sources[0], tokenizer)
    assert alone.num_sources == 1
    assert alone.num_targets_by_source([0]) == [alone.batch([0]).num_targets]
