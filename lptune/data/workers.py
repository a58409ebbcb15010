"""Rows become documents in chunks, on all cores.

A chunk is the next CHUNK_ROWS rows of a source, or fewer if they hold CHUNK_CHARACTERS. The rows decide where
a chunk ends, and what is learned of the template by trying begins anew in each; so documents, their order and
the report are the same for any number of processes. A source of a few chunks is prepared in this process:
starting others would take longer.

Otherwise this process reads the rows and hands out chunks, and workers (`serve`) write, tokenize and mask
them. A worker is a program of its own, without torch and transformers: a fork would inherit threads and the
GPU of this process, and `multiprocessing` would run the user's `__main__` again. It starts when a chunk waits
and none is idle, and encodes with one thread. What passes is JSON and arrays: nothing is unpickled. Results
are taken in order, and only two chunks a worker are on their way, so memory depends on the number of workers
and not of rows.

An error in a chunk is raised in its turn, as if the rows had been read one by one. A worker that is killed
ends the run at once. Workers end with their stdin, so none outlives this process.
"""

import dataclasses
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from lptune.base.cores import cpu_quota, num_cores
from lptune.base.errors import UserError
from lptune.base.files import MEBI
from lptune.config import DataConfig
from lptune.data.documents import DTYPES, Documents
from lptune.data.errors import BadRows, Skipped
from lptune.data.formats import Format
from lptune.data.hf import read_answer
from lptune.data.layout import Layout
from lptune.data.report import count_unused
from lptune.data.sources import JsonFloat, Row
from lptune.data.tokenization import Item, tokenize
from lptune.data.tokenizer import Tokenizer, load_tokenizer

CHUNK_ROWS = 2048
CHUNK_CHARACTERS = 4 * MEBI
CHUNKS_ALONE = 2
"""Number of chunks up to which no worker starts."""
NUM_WORKERS = "LPTUNE_DATA_WORKERS"
"""In the environment: the number of workers, where one for each core would need too much memory."""

Chunk = list[Item]


class Work(NamedTuple):
    """What is done with each chunk of a source."""

    cfg: DataConfig
    """Of this source alone."""
    tokenizer: Tokenizer
    fmt: Format

    def to_json(self) -> str:
        """All of it, for `of_json` in another process, which loads the tokenizer from its folder."""
        template = self.tokenizer.template
        day = template.date.isoformat() if template else None
        loaded_by = (str(self.tokenizer.folder), self.tokenizer.given_template, day)
        fmt = dataclasses.asdict(self.fmt) | {"columns": [*self.fmt.columns]}
        return json.dumps([dataclasses.asdict(self.cfg), loaded_by, fmt])

    @classmethod
    def of_json(cls, text: bytes) -> "Work":
        """The work that `to_json` wrote, with a tokenizer of its own."""
        cfg, (folder, chat_template, day), fmt = json.loads(text)
        tokenizer = load_tokenizer(Path(folder), chat_template, date=day and date.fromisoformat(day))
        fmt |= {"columns": frozenset(fmt["columns"]), "absent": tuple(fmt["absent"])}
        return cls(DataConfig(**cfg), tokenizer, Format(**fmt))

    def make(self, chunk: Chunk) -> "Made":
        """The documents of a chunk. Raises UserError for a row that ends the run."""
        layout, bad = Layout(self.cfg, self.tokenizer, self.fmt), BadRows(self.cfg.on_bad_row)
        rows = (item for item in chunk if isinstance(item, Row))
        count_unused(rows, self.fmt.is_used, self.fmt.message_columns, layout.template_text, layout.tally)
        documents = tokenize(chunk, self.fmt, layout, bad, seq_len=self.cfg.seq_len)
        return Made(documents, vars(layout.tally), Skipped(bad.count, bad.first))


class Made(NamedTuple):
    """The documents of a chunk, and what the report needs of its rows."""

    documents: Documents
    tally: dict[str, dict[str, int]]
    skipped: Skipped


def chunks(rows: Iterable[Row], bad: BadRows) -> Iterator[Chunk]:
    """`rows` in chunks. bad: the one that their reader adds to."""
    chunk: Chunk = []
    size = 0
    try:
        bad.among = chunk
        for row in rows:
            chunk.append(row)
            size += len(row.line) or _num_characters(row.values)
            if len(chunk) >= CHUNK_ROWS or size >= CHUNK_CHARACTERS:
                yield chunk
                bad.among = chunk = []
                size = 0
    except UserError as problem:
        chunk.append(problem)
    finally:
        bad.among = None
    if chunk:
        yield chunk


def _num_characters(value: Any) -> int:
    size, inside = 0, [value]
    for each in inside:  # which grows
        if isinstance(each, (dict, list, tuple)):
            inside += each.values() if isinstance(each, dict) else each
        else:
            size += len(each) if isinstance(each, (str, bytes)) else 1
    return size


def made(chunks: Iterator[Chunk], work: Work) -> Generator[Made, None, None]:
    """What `work` makes of each chunk, in order. Close it: workers live as long as it does."""
    first = list(itertools.islice(chunks, CHUNKS_ALONE + 1))
    all_chunks = itertools.chain(first, chunks)
    if len(first) <= CHUNKS_ALONE or (num := num_workers()) == 1:
        yield from map(work.make, all_chunks)
        return
    pool = _Pool(work, num)
    try:
        yield from pool.map(all_chunks)
    finally:
        pool.close()


def num_workers() -> int:
    """The number of workers of this process. Of the ranks of a machine, the first works while the others
    wait; what the others make, they make at the same time (distributed.machine_first).
    """
    given = os.environ.get(NUM_WORKERS, "")
    if given:
        if not given.isdecimal() or not int(given):
            raise UserError(f"{NUM_WORKERS}: must be a number of processes, at least 1, found {given!r}")
        return int(given)
    cores, ranks = min(num_cores(), cpu_quota() or float("inf")), 1
    if int(os.environ.get("LOCAL_RANK", "0")):
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "2")) - 1
    return max(1, int(cores) // ranks)


_PROGRAM = "from lptune.data.workers import serve; serve()"


class WorkerEndedError(UserError):
    """A worker has ended over its chunk."""


class _Pool:
    """Workers, each with a thread of this process that waits for it."""

    def __init__(self, work: Work, size: int) -> None:
        self._work, self._size = work, size
        self._told = work.to_json().encode() + b"\n"
        self._threads = ThreadPoolExecutor(size, "lptune-data")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._workers: list[subprocess.Popen[bytes]] | None = []

    def map(self, chunks: Iterator[Chunk]) -> Iterator[Made]:
        """What each chunk becomes, in order. Raises UserError as soon as a worker has ended."""
        waiting: deque[Future[Made]] = deque()
        for chunk in chunks:
            waiting.append(self._submit(chunk))
            if len(waiting) >= 2 * self._size:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)

    def _submit(self, chunk: Chunk) -> "Future[Made]":
        try:
            line = write_chunk(chunk, self._work.fmt)
        except (TypeError, ValueError, RecursionError):  # a date among the texts: it is made here
            return self._threads.submit(self._work.make, chunk)
        return self._threads.submit(self._ask, line)

    def _ask(self, chunk: bytes) -> Made:
        worker = getattr(self._own, "worker", None) or self._start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(chunk)
            worker.stdin.flush()
            return read_made(worker.stdout)
        except (OSError, EOFError, json.JSONDecodeError):
            code = worker.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            raise WorkerEndedError(
                f"data.source: {self._work.cfg.source}: a process that prepares rows was ended {how}; if the "
                f"memory was short, set {NUM_WORKERS}={max(1, self._size // 2)} in the environment"
            ) from None

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
        with self._lock:
            if self._workers is None:
                raise EOFError  # nobody waits for it any more
            worker = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **one, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": paths},
            )
            self._workers.append(worker)
        self._own.worker = worker
        assert worker.stdin is not None
        with suppress(OSError):  # it has ended: `_ask` notices
            worker.stdin.write(self._told)
        return worker

    def close(self) -> None:
        """Ends all workers."""
        with self._lock:
            workers, self._workers = self._workers or [], None
        for worker in workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in workers:
            with suppress(OSError):  # a chunk that it did not read
                worker.communicate()


def _first(waiting: "deque[Future[Made]]") -> Made:
    """The result of the first, or the error of any whose worker has ended."""
    while True:
        for each in waiting:
            if each.done() and isinstance(problem := each.exception(), WorkerEndedError):
                raise problem
        if waiting[0].done():
            return waiting.popleft().result()
        wait([each for each in waiting if not each.done()], return_when=FIRST_COMPLETED)


def serve() -> None:
    """Prepares chunks: reads the work from stdin, then chunks, and writes the answer to each to stdout, with
    a process of its own that renders (hf.py). Ends at once when stdin does, over whatever chunk.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; stdin ends with its owner
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    lines = queue.SimpleQueue[bytes]()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(1)  # its owner has ended

    threading.Thread(target=read, daemon=True).start()
    work = Work.of_json(lines.get())
    while True:
        try:
            found: Made | UserError | str = work.make(read_chunk(lines.get()))
        except UserError as error:
            found = error
        except Exception:
            found = traceback.format_exc()
        write_made(answers, found)
        del found


_NUMBER = "\0number"
"""The key of an object that stands for a number with its text."""
_PLAIN = (str, int, float, bool, type(None))


def write_chunk(chunk: Chunk, fmt: Format) -> bytes:
    """A chunk as a line of JSON. Raises TypeError or ValueError for a value in a column of `fmt` that JSON
    does not have. (Of other columns, only the names and whether there is a value count.)
    """

    def values(row: Row) -> Iterator[tuple[str, Any]]:
        for name, value in row.values.items():
            try:
                yield name, _encoded(value)
            except TypeError:
                if fmt.is_used(name):
                    raise
                yield name, str(value)[:100]

    items = []
    for item in chunk:
        if isinstance(item, Row):
            is_ready = item.line and "\\u0000" not in item.line  # no key is _NUMBER
            text = item.line if is_ready else json.dumps(dict(values(item)))
            items.append(f"[{json.dumps(item.place)},{text},{item.num_left_out}]")
        else:
            items.append(json.dumps(item if isinstance(item, Skipped) else str(item)))
    return f"[{','.join(items)}]\n".encode()


def _encoded(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [*map(_encoded, value)]
    if kind is dict and all(type(key) is str and key != _NUMBER for key in value):
        return {key: _encoded(each) for key, each in value.items()}
    if kind is JsonFloat:
        return {_NUMBER: value.text}
    raise TypeError(kind.__name__)


def read_chunk(line: bytes) -> Chunk:
    """The chunk that `write_chunk` wrote."""
    items = json.loads(
        line,
        parse_float=JsonFloat,
        object_hook=lambda each: JsonFloat(each[_NUMBER]) if _NUMBER in each else each,
    )
    return [
        UserError(item) if isinstance(item, str) else Row(*item) if len(item) == 3 else Skipped(*item)
        for item in items
    ]


def write_made(file: IO[bytes], found: Made | UserError | str) -> None:
    """Writes the answer to a chunk: a result, an error of the input, or the traceback of a fault."""
    facts: dict[str, Any] = {"fault": found} if isinstance(found, str) else {"error": str(found)}
    arrays = []
    if isinstance(found, Made):
        facts = {"tally": found.tally, "skipped": found.skipped}
        arrays = [np.ascontiguousarray(getattr(found.documents, name), DTYPES[name]) for name in DTYPES]
    line = json.dumps({**facts, "sizes": [array.nbytes for array in arrays]})
    file.write(line.encode() + b"\n")
    for array in arrays:
        file.write(array.tobytes())
    file.flush()


def read_made(file: IO[bytes]) -> Made:
    """Reads what `write_made` wrote; raises it if it is an error, and EOFError if it is cut off."""
    facts, bodies = read_answer(file)
    if "error" in facts:
        raise UserError(facts["error"])
    if "fault" in facts:
        raise RuntimeError(f"a process that prepares rows failed:\n{facts['fault']}")
    arrays = {
        name: np.frombuffer(body, dtype) for (name, dtype), body in zip(DTYPES.items(), bodies, strict=True)
    }
    arrays["answers_N2"] = arrays["answers_N2"].reshape(-1, 2)
    return Made(Documents(**arrays), facts["tally"], Skipped(*facts["skipped"]))
