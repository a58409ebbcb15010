"""From `data.source` to packed rows: read, detect, write as text, tokenize, hold out, weigh, pack, and
report.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lptune.base.errors import UnavailableError, UserError
from lptune.base.progress import counting
from lptune.config import DataConfig, SourceConfig, check_sources, data_files, left_out
from lptune.data.cache import Content, Facts, cache_key, cached, content_of, files_stat, in_memory
from lptune.data.detect import detect_format, detect_labelled, detect_preferences
from lptune.data.documents import Documents, joined, sources_of
from lptune.data.errors import BadRows
from lptune.data.layout import Layout
from lptune.data.order import split_by_prompt, weighted
from lptune.data.packing import cut_to_fill, one_group_per_row, pack_groups
from lptune.data.report import OF_ANSWERS, counted, describe
from lptune.data.rows import Rows
from lptune.data.shared import SharedRows
from lptune.data.sources import Row, read_rows
from lptune.data.tokenizer import Tokenizer
from lptune.data.workers import Chunk, Work, chunks, made

DETECTION_ROWS = 32
WORTH_A_NOTE = 0.9
"""Share of tokens that are not padding, below which the report says what to do."""
_DETECT = {"answers": detect_format, "preferences": detect_preferences, "labelled": detect_labelled}
"""By the reading of the rows: one answer to learn; two answers to compare; answers with a label."""
_OF_AN_ENTRY = re.compile(
    r"data\.(format|(?:prompt|input|response|messages|text|chosen|rejected|label|system)_column|prompt_template|system_prompt)\b"
)
"""Keys of `data` that an entry of a list of sources may override."""


class Prepared(NamedTuple):
    """Everything a run needs of its data."""

    train: Rows
    evaluation: Rows | None
    report: list[str]
    """Lines to print: what was read, dropped and truncated, and how full the rows are."""

    @property
    def held_out(self) -> Rows:
        """`evaluation`, where there is something to evaluate on."""
        assert self.evaluation is not None, "neither data.eval_fraction nor data.eval_source is set"
        return self.evaluation


class EvaluationRows(NamedTuple):
    """The rows that a model is evaluated on, packed source by source."""

    of_source: dict[str, Rows]
    """By the name of the source; a source of which nothing is held out is missing."""
    report: list[str]
    """As in `Prepared`."""


class _Source(NamedTuple):
    documents: Documents
    is_text: bool
    report: list[str]


def prepare(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    vocab_size: int,
    preferences: bool = False,
    labelled: bool = False,
    cuts: bool | None = None,
) -> Prepared:
    """Packed rows for training and, if the config asks for it, for evaluation. A function of its arguments
    and the files. Tokenized documents are stored in the folder that `cfg.cache` names, and read from there.

    Documents are held out before weights apply: evaluation sees each once, and training sees none of its
    copies. vocab_size: of the model; a larger token id is a UserError. tokenizer: loaded with
    `cfg.chat_template`; ValueError otherwise. preferences: read each row as a prompt with a chosen and a
    rejected answer; documents 2i and 2i + 1 are its two documents, which stay together in all that follows.
    labelled: read each row as an answer with a label, or a preference as two such answers. cuts: whether
    training texts are cut at the ends of rows; None: if `cfg.cut_text` is true.
    """
    reading = "preferences" if preferences else "labelled" if labelled else "answers"
    size = 2 if preferences else 1
    if cfg.chat_template is not None and cfg.chat_template != tokenizer.given_template:
        raise ValueError(
            "prepare: the tokenizer has another chat template than data.chat_template; make it by "
            "load_tokenizer(folder, cfg.data.chat_template)"
        )
    check_sources("data.source", cfg.sources)
    check_sources("data.eval_source", cfg.eval_sources)
    read = partial(_read_all, cfg, tokenizer, vocab_size, reading)
    sources = read("data.source")
    report = [line for source in sources for line in source.report]
    documents, evaluation = joined([source.documents for source in sources]), None
    numbers = _numbers(sources)
    if cfg.eval_fraction:
        held_out_N = _hold_out(cfg, sources, seed)
        evaluation = documents.select(np.flatnonzero(held_out_N))
        numbers = [numbers_N[~held_out_N[numbers_N]] for numbers_N in numbers]
    elif cfg.eval_sources:
        evaluated = read("data.eval_source")
        evaluation = joined([source.documents for source in evaluated])
        report += [line for source in evaluated for line in source.report]
        shared = np.isin(evaluation.prompt_keys_N, documents.prompt_keys_N).sum()
        if shared:
            report.append(
                f"note: {shared:,} of {evaluation.num_documents:,} documents of {_names(cfg.eval_sources)} "
                f"have a prompt of {_names(cfg.sources)}"
            )
    if not all(source.is_text for source in sources):
        report += [f"note: {note}" for note in (tokenizer.template_note, tokenizer.start_note) if note]
    train, shares = _weigh(cfg, documents, numbers, seed, size)
    pad_id = tokenizer.pad_id if tokenizer.pad_id < vocab_size else 0
    train_rows = _pack(cfg, train, seed, pad_id, size)
    is_text_N = np.array([source.is_text for source in sources])[
        sources_of(train, np.arange(train.num_documents))
    ]
    if (bool(cfg.cut_text) if cuts is None else cuts) and cfg.packing:
        train_rows = _cut(train_rows, is_text_N)
    if num_cuts := np.count_nonzero(train_rows.documents.goes_on):
        shares.append(f"note: cut texts at {num_cuts:,} ends of rows (data.cut_text)")
    report += [
        *shares,
        describe("training", train_rows, reading),
        *_empty(cfg, train_rows, bool(is_text_N.any())),
    ]
    if evaluation is None:
        return Prepared(train_rows, None, report)
    evaluation_rows = _pack(cfg, evaluation, seed, pad_id, size)
    report.append(describe("evaluation", evaluation_rows, reading))
    return Prepared(train_rows, evaluation_rows, report)


def prepare_texts(
    cfg: DataConfig, tokenizer: Tokenizer, *, seed: int, vocab_size: int, cuts: bool = True
) -> Prepared:
    """`prepare` for pre-training, where a `cfg.cut_text` that is not set means `cuts`."""
    cuts = cuts if cfg.cut_text is None else cfg.cut_text
    return prepare(cfg, tokenizer, seed=seed, vocab_size=vocab_size, cuts=cuts)


def prepare_preferences(cfg: DataConfig, tokenizer: Tokenizer, *, seed: int, vocab_size: int) -> Prepared:
    """`prepare` for rows of a prompt with a chosen and a rejected answer."""
    return prepare(cfg, tokenizer, seed=seed, vocab_size=vocab_size, preferences=True)


def prepare_labelled(cfg: DataConfig, tokenizer: Tokenizer, *, seed: int, vocab_size: int) -> Prepared:
    """`prepare` for answers with a label."""
    return prepare(cfg, tokenizer, seed=seed, vocab_size=vocab_size, labelled=True)


def prepare_evaluation(
    cfg: DataConfig, tokenizer: Tokenizer, *, seed: int, vocab_size: int
) -> EvaluationRows:
    """The rows that `prepare` with the same arguments holds out; all rows of data.source if `cfg` holds out
    none. Each document is there once, whatever the weights are. Arguments and errors as in `prepare`.
    """
    key = "data.eval_source" if cfg.eval_sources else "data.source"
    entries = cfg.eval_sources or cfg.sources
    check_sources(key, entries)
    sources = _read_all(cfg, tokenizer, vocab_size, "answers", key)
    report = [line for source in sources for line in source.report]
    documents, numbers = joined([source.documents for source in sources]), _numbers(sources)
    if cfg.eval_fraction:
        held_out_N = _hold_out(cfg, sources, seed)
        numbers = [numbers_N[held_out_N[numbers_N]] for numbers_N in numbers]
    pad_id = tokenizer.pad_id if tokenizer.pad_id < vocab_size else 0
    found: dict[str, Rows] = {}
    for i, (entry, numbers_N) in enumerate(zip(entries, numbers, strict=True)):
        name = f"{entry.source} ({key}[{i}])" if entry.source in found else entry.source
        if len(numbers_N):
            found[name] = _pack(cfg, documents.select(numbers_N), seed, pad_id, 1)
            report.append(describe(f"evaluation on {name}", found[name], "answers"))
        else:
            report.append(f"note: {name} has no document in the held-out share")
    return EvaluationRows(found, report)


def _names(sources: Sequence[SourceConfig]) -> str:
    return ", ".join(entry.source for entry in sources)


def _numbers(sources: Sequence[_Source]) -> list[npt.NDArray[np.int64]]:
    """For each source, the numbers of its documents among all documents."""
    bounds = np.cumsum([0, *(source.documents.num_documents for source in sources)])
    return [np.arange(first, stop) for first, stop in itertools.pairwise(bounds.tolist())]


def _weigh(
    cfg: DataConfig, documents: Documents, numbers: list[npt.NDArray[np.int64]], seed: int, size: int
) -> tuple[Documents, list[str]]:
    """The training documents: those of `numbers`, for each source as often as its weight says. Also lines for
    the report on the share of each source. size: number of documents that stay together.
    """
    entries = cfg.sources
    chosen = [
        numbers_N if entry.weight == 1 else weighted(numbers_N, entry.weight, seed, i, size)
        for i, (entry, numbers_N) in enumerate(zip(entries, numbers, strict=True))
    ]
    for i, (entry, before_N, after_N) in enumerate(zip(entries, numbers, chosen, strict=True)):
        if len(before_N) and not len(after_N):
            raise UserError(
                f"data.source[{i}].weight: {entry.weight:g} of the {len(before_N):,} documents of "
                f"{entry.source} selects none; raise it, or leave the source out"
            )
    if len(entries) == 1 and entries[0].weight == 1:
        is_whole = len(chosen[0]) == documents.num_documents
        return documents if is_whole else documents.select(chosen[0]), []
    num_tokens = [int(documents.lengths[numbers_N].sum()) for numbers_N in chosen]
    return documents.select(np.concatenate(chosen)), [
        f"mixture: {len(numbers_N):,} documents, {count:,} tokens ({count / sum(num_tokens):.1%}) of "
        f"{entry.source}, weight {entry.weight:g}"
        for entry, numbers_N, count in zip(entries, chosen, num_tokens, strict=True)
    ]


def _read_all(
    cfg: DataConfig, tokenizer: Tokenizer, vocab_size: int, reading: str, key: str
) -> list[_Source]:
    """Reads all sources of `key`; those without a split of their own, `cfg.split` of it."""
    sources, entries = [], cfg.sources if key == "data.source" else cfg.eval_sources
    for number, entry in enumerate(entries):
        keys: dict[str, Any] = {"eval_fraction": 0.0, "eval_source": None, "eval_split": None}
        own = {name: value for name, value in asdict(entry).items() if value is not None}
        keys |= {name: value for name, value in own.items() if name not in ("name", "weight")}
        try:
            own_cfg, is_training = replace(cfg, **keys), key == "data.source"
            sources.append(_read(entry.source, own_cfg, tokenizer, vocab_size, is_training, reading))
        except UnavailableError:  # of storage, which names its own key, and may answer the next start
            raise
        except UserError as error:
            message = str(error).replace("data.source", key)  # the reader always writes data.source
            message = _of_entry(message, entry, key, number, is_alone=len(entries) == 1)
            raise UserError(message) from None
    return sources


def _of_entry(message: str, entry: SourceConfig, key: str, number: int, *, is_alone: bool) -> str:
    """`message`, with each key that `entry` sets written as the key of that entry, for example
    data.source[1].prompt_column.
    """
    keys = dict.fromkeys(_OF_AN_ENTRY.findall(message))
    for name in keys:
        if getattr(entry, name) is not None:
            message = re.sub(rf"data\.{name}\b", f"{key}[{number}].{name}", message)
    if is_alone or all(getattr(entry, name) is not None for name in keys):
        return message
    if _OF_AN_ENTRY.match(message):  # set for all entries, but not usable in this one
        return f"{message} (or set it in those entries of {key} that need it)"
    return f"{message} (or set it in {key}[{number}])"


def _read(
    source: str, cfg: DataConfig, tokenizer: Tokenizer, vocab_size: int, is_training: bool, reading: str
) -> _Source:
    """Reads one source. cfg: the config of this source."""
    make = partial(_make, source, cfg, tokenizer, is_training, reading)
    content = None if cfg.cache == "none" else content_of(source, cfg)
    shared = None
    if content is None:
        found = in_memory(partial(make, None, None))
    else:
        key = cache_key(content, cfg, tokenizer, is_training=is_training, reading=reading)
        if "://" in cfg.cache:
            shared = SharedRows(cfg.cache, key, partial(_check_unchanged, source, content))
        found = cached("auto" if shared else cfg.cache, key, partial(make, content, shared))
    _check_vocabulary(found.facts["largest_token"], tokenizer, vocab_size)
    notes = [*found.notes, *(shared.notes if shared else ())]
    if others := left_out(source):
        notes = [f"not read in {source}: {', '.join(others[:5])}{', …' * (len(others) > 5)}", *notes]
    report = [*found.facts["report"], *(f"note: {note}" for note in notes)]
    return _Source(found.documents, found.facts["is_text"], report)


def _make(
    source: str,
    cfg: DataConfig,
    tokenizer: Tokenizer,
    is_training: bool,
    reading: str,
    content: Content | None,
    shared: SharedRows | None,
    add: Callable[[Documents], None],
) -> Facts:
    """Reads and tokenizes `source`, and passes its documents to `add`. shared: what other machines do of it,
    too; None: nothing.
    """
    bad = BadRows(cfg.on_bad_row)
    first, all_chunks = _open(source, cfg, bad)
    fmt = _DETECT[reading](cfg, first, source)
    layout = Layout(cfg, tokenizer, fmt)  # it writes nothing: it adds up what the chunks count
    counts, num_documents, num_tokens, largest_token = layout.counts, 0, 0, 0
    work = Work(cfg, tokenizer, fmt)
    if shared is None:
        parts = made(all_chunks, work)
    else:
        parts = shared.made(all_chunks, lambda: _open(source, cfg, BadRows(cfg.on_bad_row))[1], work)
    with counting(f"tokenizing {source}", "documents") as advance, closing(parts):
        for part in parts:
            num_documents += part.documents.num_documents
            num_tokens += len(part.documents.tokens_T)
            assert isinstance(part.documents.tokens_T, np.ndarray)
            largest_token = max(largest_token, int(part.documents.tokens_T.max(initial=0)))
            layout.tally.add(part.tally)
            bad.skip(*part.skipped)
            add(part.documents)
            advance(part.documents.num_documents)
    if content is not None:
        _check_unchanged(source, content)
    files = data_files(source)
    if not num_documents:
        if bad.count:
            raise UserError(f"{source}: no usable row: {bad.count:,} bad, the first: {bad.first}")
        if dropped := counted(counts, OF_ANSWERS, seq_len=cfg.seq_len):
            what = "answer" if fmt.label else "preference"
            raise UserError(f"{source}: no usable {what}: {'; '.join(dropped)}")
        if counts["num_unlearned_documents"] and not counts["num_dropped_documents"]:
            raise UserError(
                f"{source}: all {counts['num_rows']:,} rows are masked: none of their answers is learned "
                "(weight 0, or outside the chat template's marks); remove the weights or correct "
                "data.chat_template"
            )
        raise UserError(
            f"{source}: all {counts['num_rows']:,} rows are masked: no document has a target within "
            f"data.seq_len={cfg.seq_len} tokens; raise "
            f"data.seq_len, or check the response column and the chat template"
        )
    layout.check(is_training, num_tokens)
    of_files = f" of {len(files):,} files" if files and len(files) > 1 else ""
    lines = [f"{source}: {counts['num_rows']:,} rows{of_files} as {fmt.describe()}, {layout.describe()}"]
    of_rows = counted(counts, seq_len=cfg.seq_len, **layout.examples())
    of_rows += layout.tally.notes_on_unused(fmt.todo_of_unused)
    lines += [f"note: {note}" for note in [*_odd(cfg, bad), *of_rows]]
    return {"report": lines, "is_text": layout.is_text, "largest_token": largest_token}


def _open(source: str, cfg: DataConfig, bad: BadRows) -> tuple[list[Row], Iterator[Chunk]]:
    """The first rows of `source`, by which its format is detected, and chunks of all of them."""
    rows = read_rows(source, bad, split=cfg.split, max_rows=cfg.max_rows)
    first = list(itertools.islice(rows, DETECTION_ROWS))
    return first, chunks(itertools.chain(first, rows), bad)


def _check_unchanged(source: str, content: Content) -> None:
    if content.stat != files_stat(data_files(source)):
        raise UserError(f"{source}: was changed while it was read; run again")


def _odd(cfg: DataConfig, bad: BadRows) -> Iterator[str]:
    """Notes on keys that look like a slip, and on rows that were skipped."""
    for key, text in (("prompt_template", cfg.prompt_template), ("system_prompt", cfg.system_prompt)):
        if text is not None and "\\n" in text:
            yield f"data.{key} holds a backslash and an n, not a line break; a shell makes one of $'…\\n…'"
    if bad.count:
        rows = "row" if bad.count == 1 else "rows, the first"
        yield f"skipped {bad.count:,} bad {rows}: {bad.first}"


def _check_vocabulary(largest: int, tokenizer: Tokenizer, vocab_size: int) -> None:
    if largest >= vocab_size:
        text = tokenizer.backend.id_to_token(largest)
        raise UserError(
            f"{tokenizer.folder}: token {text!r} has id {largest}, the model's vocabulary ends at "
            f"{vocab_size - 1} (vocab_size {vocab_size}); use the tokenizer that belongs to the model"
        )


def _hold_out(cfg: DataConfig, sources: Sequence[_Source], seed: int) -> npt.NDArray[np.bool_]:
    """True for each document to hold out. Documents with equal prompts are all held out or all trained on,
    also across sources. The side depends on the seed and the prompt alone.
    """
    keys = [source.documents.prompt_keys_N for source in sources]
    first = 0
    for i, source in enumerate(sources):
        others = [keys_N for j, keys_N in enumerate(keys) if j != i]
        if source.is_text and (keys[i] == keys[i][0]).all() and not any(keys[i][0] in o for o in others):
            # One long text, read once: some of its chunks are held out.
            keys[i] = np.arange(first, first + len(keys[i]), dtype=np.uint64)
        first += len(keys[i])
    keys_N = np.concatenate(keys)
    held_out_N = split_by_prompt(keys_N, cfg.eval_fraction, seed)
    if held_out_N is None:
        what = (
            "one document" if len(keys_N) == 1 else f"{len(keys_N):,} documents with one and the same prompt"
        )
        verb = "gives" if len(sources) == 1 else "give"
        raise UserError(
            f"data.eval_fraction: {_names(cfg.sources)} {verb} {what}, and each side needs one; set "
            "data.eval_source or 0"
        )
    return held_out_N


def _pack(cfg: DataConfig, documents: Documents, seed: int, pad_id: int, size: int) -> Rows:
    if cfg.packing:
        packing = pack_groups(documents.lengths, size, cfg.seq_len, seed)
    else:
        packing = one_group_per_row(documents.num_documents // size, size)
    return Rows(documents, packing, seq_len=cfg.seq_len, pad_id=pad_id)


def _cut(rows: Rows, is_text_N: npt.NDArray[np.bool_]) -> Rows:
    """`rows`, with texts cut where that saves rows."""
    found = cut_to_fill(rows.documents.lengths, is_text_N, rows.packing, rows.seq_len)
    if found is None:
        return rows
    parts, packing = found
    return Rows(rows.documents.cut(*parts), packing, seq_len=rows.seq_len, pad_id=rows.pad_id)


def _empty(cfg: DataConfig, rows: Rows, has_text: bool) -> Iterator[str]:
    """A note if much of the rows is padding. The last row may be anything."""
    if rows.num_tokens >= WORTH_A_NOTE * (rows.num_rows - 1) * rows.seq_len:
        return
    longest = int(rows.documents.lengths.max())
    if not cfg.packing:
        todo = "data.packing=true lets documents share a row"
    elif has_text and not cfg.cut_text:
        todo = "data.cut_text=true cuts texts where a row ends"
    else:
        todo = f"another data.seq_len may fit the documents better (the longest has {longest:,} tokens)"
    yield f"note: rows are {rows.fill:.1%} full, and a step computes the padding, too; {todo}"
