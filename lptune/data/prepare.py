"""From `data.source` to rows: read, recognise, write down, tokenize, hold out, pack; and say what was
done.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lptune.config import DataConfig, UserError
from lptune.data.cache import Facts, cached, in_memory
from lptune.data.cache_key import Content, cache_key, content_of, file_stat
from lptune.data.columns import Unused
from lptune.data.detect import detect_format
from lptune.data.documents import Counts, Documents, tokenize
from lptune.data.errors import BadRows
from lptune.data.layout import Layout
from lptune.data.order import shuffled
from lptune.data.packing import one_document_per_row, pack
from lptune.data.rows import Rows
from lptune.data.sources import read_rows
from lptune.data.tokenizer import Tokenizer

DETECTION_ROWS = 32


class Prepared(NamedTuple):
    """Everything a run needs of its data."""

    train: Rows
    evaluation: Rows | None
    report: list[str]
    """Lines to print: what was read, dropped, truncated, how full the rows are."""


class _Source(NamedTuple):
    documents: Documents
    is_text: bool
    report: list[str]


def prepare(cfg: DataConfig, tokenizer: Tokenizer, *, seed: int, vocab_size: int) -> Prepared:
    """Rows for training and, where the config asks for it, for evaluation. A function of its arguments and
    the files; what was tokenized is kept in the folder `cfg.cache` names, and read from there.

    vocab_size: of the model; a token beyond it is a UserError. `cfg.chat_template` is applied here too.
    """
    if cfg.chat_template is not None:
        tokenizer = tokenizer.with_chat_template(cfg.chat_template)
    source = _read(cfg.source, cfg.split, cfg, tokenizer, vocab_size)
    report = source.report
    train, evaluation = source.documents, None
    if cfg.eval_fraction:
        train, evaluation = _hold_out(cfg, train, source.is_text, seed)
    elif cfg.eval_source is not None:
        try:
            evaluated = _read(cfg.eval_source, cfg.eval_split or cfg.split, cfg, tokenizer, vocab_size)
        except UserError as error:  # the reader names the key that it usually reads
            raise UserError(str(error).replace("data.source", "data.eval_source")) from None
        evaluation = evaluated.documents
        report += evaluated.report
        shared = np.isin(evaluation.prompt_keys_N, train.prompt_keys_N).sum()
        if shared:
            report.append(
                f"note: {shared:,} of {evaluation.num_documents:,} documents of {cfg.eval_source} have a "
                f"prompt of {cfg.source}"
            )
    pad_id = tokenizer.pad_id if tokenizer.pad_id < vocab_size else 0
    train_rows = _pack(cfg, train, seed, pad_id)
    report.append(_describe("training", train_rows))
    if evaluation is None:
        return Prepared(train_rows, None, report)
    evaluation_rows = _pack(cfg, evaluation, seed, pad_id)
    report.append(_describe("evaluation", evaluation_rows))
    return Prepared(train_rows, evaluation_rows, report)


def _read(source: str, split: str, cfg: DataConfig, tokenizer: Tokenizer, vocab_size: int) -> _Source:
    make = partial(_make, source, split, cfg, tokenizer)
    content = None if cfg.cache == "none" else content_of(source, split, cfg)
    if content is None:
        found = in_memory(partial(make, None))
    else:
        found = cached(cfg.cache, cache_key(content, source, split, cfg, tokenizer), partial(make, content))
    _check_vocabulary(found.facts["largest_token"], tokenizer, vocab_size)
    notes = [f"note: {note}" for note in found.notes]
    return _Source(found.documents, found.facts["is_text"], [*found.facts["report"], *notes])


def _make(
    source: str,
    split: str,
    cfg: DataConfig,
    tokenizer: Tokenizer,
    content: Content | None,
    add: Callable[[Documents], None],
) -> Facts:
    """Reads and tokenizes `source`, and hands its documents to `add`."""
    bad = BadRows(cfg.on_bad_row)
    rows = read_rows(source, bad, split=split, max_rows=cfg.max_rows)
    first = list(itertools.islice(rows, DETECTION_ROWS))
    fmt = detect_format(cfg, first, source)
    layout = Layout(cfg, tokenizer, fmt)
    unused = Unused(fmt.is_used, fmt.message_columns, layout.template_text)
    counts, num_documents, largest_token = Counts(), 0, 0
    for part in tokenize(
        unused.watch(itertools.chain(first, rows)), fmt, layout, tokenizer, bad, counts,
        seq_len=cfg.seq_len, train_on_prompt=cfg.train_on_prompt,
    ):  # fmt: skip
        num_documents += part.num_documents
        largest_token = max(largest_token, int(part.tokens_T.max(initial=0)))
        add(part)
    if content is not None and content.stat != file_stat(source):
        raise UserError(f"{source}: was changed while it was read; run again")
    if not num_documents:
        if bad.count:
            raise UserError(f"{source}: no usable row: {bad.count:,} bad, the first: {bad.first}")
        raise UserError(
            f"{source}: all {unused.num_rows:,} rows are masked: no document has a target within "
            f"data.seq_len={cfg.seq_len} tokens; raise "
            f"data.seq_len, or check the response column and the chat template"
        )
    layout.check(is_training=source == cfg.source)
    lines = [f"{source}: {unused.num_rows:,} rows as {fmt.describe()}, {layout.describe()}"]
    lines += [f"note: {note}" for note in [*_losses(cfg, counts, bad), *layout.notes(), *unused.notes()]]
    return {"report": lines, "is_text": layout.is_text, "largest_token": largest_token}


def _losses(cfg: DataConfig, counts: Counts, bad: BadRows) -> list[str]:
    lines = []
    for key, text in (("prompt_template", cfg.prompt_template), ("system_prompt", cfg.system_prompt)):
        if text is not None and "\\n" in text:
            lines.append(
                f"data.{key} holds a backslash and an n, not a line break; a shell makes one of $'…\\n…'"
            )
    if bad.count:
        lines.append(f"skipped {bad.count:,} bad rows, the first: {bad.first}")
    if counts.num_truncated_documents:
        lines.append(
            f"cut {counts.num_truncated_tokens:,} tokens off {counts.num_truncated_documents:,} documents "
            "longer than "
            f"data.seq_len={cfg.seq_len}"
        )
    if counts.num_dropped_documents:
        lines.append(
            f"dropped {counts.num_dropped_documents:,} documents without a target in their first "
            f"{cfg.seq_len} tokens"
        )
    if counts.num_unknown_tokens:
        lines.append(f"{counts.num_unknown_tokens:,} tokens are unknown to the tokenizer (<unk>)")
    if counts.num_placeholder_rows:
        lines.append(
            f"{counts.num_placeholder_rows:,} rows hold placeholders such as {{{{name}}}}, learned as they "
            "stand"
        )
    return lines


def _check_vocabulary(largest: int, tokenizer: Tokenizer, vocab_size: int) -> None:
    if largest >= vocab_size:
        text = tokenizer.backend.id_to_token(largest)
        raise UserError(
            f"{tokenizer.folder}: token {text!r} has id {largest}, the model's vocabulary ends at "
            f"{vocab_size - 1} (vocab_size {vocab_size}); "
            f"use the tokenizer that belongs to the model"
        )


def _hold_out(cfg: DataConfig, documents: Documents, is_text: bool, seed: int) -> tuple[Documents, Documents]:
    """Documents with equal prompts stay on one side. Which side a prompt falls on depends on the seed and the
    prompt alone.
    """
    keys_N = documents.prompt_keys_N
    if is_text and len(np.unique(keys_N)) == 1:
        keys_N = np.arange(documents.num_documents, dtype=np.uint64)  # one long text: its chunks are held out
    held_out_N = split_by_prompt(keys_N, cfg.eval_fraction, seed)
    if held_out_N is None:
        what = (
            "one document"
            if documents.num_documents == 1
            else f"{documents.num_documents:,} documents with one and the same prompt"
        )
        raise UserError(
            f"data.eval_fraction: {cfg.source} gives {what}, and each side needs one; set data.eval_source "
            "or 0"
        )
    return documents.select(np.flatnonzero(~held_out_N)), documents.select(np.flatnonzero(held_out_N))


def split_by_prompt(
    keys_N: npt.NDArray[np.uint64], fraction: float, seed: int
) -> npt.NDArray[np.bool_] | None:
    """True where a document is held out: about `fraction` of them, all or none of those with one key. None
    where one side stays empty.
    """
    unique_P, inverse_N, counts_P = np.unique(keys_N, return_inverse=True, return_counts=True)
    if len(unique_P) < 2:
        return None
    wanted = min(max(1, round(fraction * len(keys_N))), len(keys_N) - 1)
    ranks_P = shuffled(unique_P, seed)
    held_out_P = np.zeros(len(unique_P), dtype=np.bool_)
    taken = 0
    for p in np.argsort(ranks_P, kind="stable").tolist():
        if taken >= wanted:
            break
        if taken + counts_P[p] <= wanted:  # a prompt with more documents than are wanted stays in training
            held_out_P[p] = True
            taken += counts_P[p]
    if not taken:
        held_out_P[np.argmin(counts_P)] = True
    held_out_N: npt.NDArray[np.bool_] = held_out_P[inverse_N]
    return held_out_N


def _pack(cfg: DataConfig, documents: Documents, seed: int, pad_id: int) -> Rows:
    if cfg.packing:
        packing = pack(documents.lengths, cfg.seq_len, seed)
    else:
        packing = one_document_per_row(documents.num_documents)
    return Rows(documents, packing, seq_len=cfg.seq_len, pad_id=pad_id)


def _describe(name: str, rows: Rows) -> str:
    return (
        f"{name}: {rows.num_documents:,} documents, {rows.num_tokens:,} tokens ({rows.num_target_tokens:,} "
        f"targets) in {rows.num_rows:,} rows "
        f"of {rows.seq_len}, {rows.fill:.1%} full"
    )
