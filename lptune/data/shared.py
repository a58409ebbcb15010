"""Rows that several machines prepare together, through object storage: `data.cache=s3://…`.

    ADDRESS/KEY/000000, 000001, …   parts: what CHUNKS_PER_PART chunks of a source have become (workers.py)
    ADDRESS/KEY/parts               their number

KEY is that of the cache (cache.py). Each of M machines reads all rows, which is cheap, makes every M-th part,
and then fetches all parts in order into its own cache. A part holds its chunks one by one, as workers answer
them; so the entry, the report and the error of a bad row are those of a machine that makes everything itself.

Parts do not depend on M: a start after a kill, with more machines or with fewer, and later runs make only
those that are missing. One that does not come (its machine has ended, has met a bad row, or has the entry
already) is made by those that wait for it, and so is a damaged one. Each object begins with a digest of its
place and its content. Nothing in it is unpickled.
"""

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import cached_property, partial
from io import BytesIO
from itertools import groupby

from lptune.base.errors import UnavailableError, UserError
from lptune.base.progress import counting, print_line
from lptune.base.storage import Storage, StorageError
from lptune.data.workers import Chunk, Made, Work, WorkerEndedError, made, read_made, write_made

CHUNKS_PER_PART = 4
"""At most 8,192 rows or 16 MiB of characters: some 20 MB, and seconds of work."""
PATIENCE_S = 30.0
"""How long one part is waited for."""
_TELL_S = 5.0
"""After how long a line says so."""
_POLL_S = 1.0
_NUMBER = "parts"


class SharedRows:
    """The parts of one source, on this machine. Methods raise UserError if the storage refuses something."""

    def __init__(self, address: str, key: str, check: Callable[[], None]) -> None:
        """key: of the cache entry. check: raises UserError if the source is no longer what `key` says."""
        self._machine, self._num_machines = machine_here()
        self._place, self._check = f"{address.rstrip('/')}/{key}", check
        self._first = int(key, 16)  # or machine 0 would make the first part of each source
        self._num_parts: int | None = None
        self._num_made = 0
        self._notes: list[str] = []

    @cached_property
    def _storage(self) -> Storage:
        return Storage(self._place)  # which imports much, and only the first rank of a machine needs it

    @property
    def notes(self) -> list[str]:
        """Lines for the report: what was made here, and why, beyond the share of this machine."""
        if self._num_parts is None:
            return []
        return [f"{self._num_made} of {self._num_parts} parts of {self._place} made here", *self._notes]

    def made(
        self, chunks: Iterator[Chunk], again: Callable[[], Iterator[Chunk]], work: Work
    ) -> Generator[Made, None, None]:
        """What `work` makes of each of `chunks`, as `workers.made`. again: reads the same chunks anew."""
        there = self._names()
        self._num_parts = self._read_number() if _NUMBER in there else None
        if self._num_parts is None or any(
            self._is_own(number) and _name(number) not in there for number in range(self._num_parts)
        ):
            try:
                self._make(chunks, work, lambda number: self._is_own(number) and _name(number) not in there)
            except (StorageError, WorkerEndedError):
                raise
            except UserError:  # of a row, perhaps not the first that is bad: told in its turn, below
                self._check()
        number, made_again = 0, set[int]()
        while self._num_parts is None or number < self._num_parts:
            if (part := self._fetch(number)) is not None:
                yield from part
                number += 1
            elif number in made_again:
                what = "is not what was written to it"
                raise UserError(f"data.cache: {self._place}/{_name(number)}: {what}; name another address")
            else:
                made_again.add(number)
                self._make(again(), work, partial(self._is_missing, number))

    def _is_own(self, number: int) -> bool:
        return (self._first + number) % self._num_machines == self._machine

    def _is_missing(self, first: int, number: int) -> bool:
        """Whether a part is made in place of its machine, which did not write the part `first`."""
        of_the_same = number > first and (number - first) % self._num_machines == 0
        return number == first or (of_the_same and _name(number) not in self._names())

    def _make(self, chunks: Iterator[Chunk], work: Work, is_wanted: Callable[[int], bool]) -> None:
        """Makes and writes those parts of `chunks`, and learns how many parts there are."""
        under_way = deque[int]()  # of each chunk that is being made, its part
        last = -1

        def wanted() -> Iterator[Chunk]:
            nonlocal last
            for last, part in groupby(enumerate(chunks), lambda each: each[0] // CHUNKS_PER_PART):
                if is_wanted(last):
                    for _, chunk in part:
                        under_way.append(last)
                        yield chunk

        what = f"tokenizing {work.cfg.source}, as machine {self._machine} of {self._num_machines}"
        with counting(what, "documents") as advance, closing(made(wanted(), work)) as found:
            for number, part in groupby(found, lambda _: under_way.popleft()):
                body = BytesIO()
                for each in part:
                    write_made(body, each)
                    advance(each.documents.num_documents)
                self._check()
                self._write(_name(number), body.getvalue())
                self._num_made += 1
        self._num_parts = last + 1
        self._check()
        self._write(_NUMBER, str(self._num_parts).encode())

    def _fetch(self, number: int) -> list[Made] | None:
        """A part; None if it does not come or is damaged."""
        name, begun_s, is_told = _name(number), time.monotonic(), False
        owner = (self._first + number) % self._num_machines
        while (body := self._read(name)) is None:
            if owner == self._machine:
                return None
            if (waited_s := time.monotonic() - begun_s) > PATIENCE_S:
                self._notes.append(f"machine {owner} did not write {self._place}/{name}: made here, too")
                return None
            if waited_s > _TELL_S and not is_told:
                print_line(f"waiting for machine {owner} of {self._num_machines}: {self._place}/{name} ...")
                is_told = True
            time.sleep(_POLL_S)
        file, found = BytesIO(body), []
        try:
            while file.tell() < len(body):
                found.append(read_made(file))
        except (EOFError, ValueError, KeyError, TypeError):  # not written by this class
            found.clear()
        if not found:
            self._notes.append(f"{self._place}/{name} was damaged and is made anew")
        return found or None

    def _read_number(self) -> int | None:
        content = self._read(_NUMBER) or b""
        return int(content) if content.isdigit() else None

    def _names(self) -> set[str]:
        with _of_the_key():
            return {*self._storage.sizes()}

    def _read(self, name: str) -> bytes | None:
        """What was written as `name`; None if it is not there, empty if it is damaged."""
        with _of_the_key():
            content = self._storage.read(name, None)
        if content is None:
            return None
        digest, _, body = content.partition(b"\n")
        return body if digest == self._digest(name, body) else b""

    def _write(self, name: str, body: bytes) -> None:
        with _of_the_key():
            self._storage.write(name, b"%s\n%s" % (self._digest(name, body), body))

    def _digest(self, name: str, body: bytes) -> bytes:
        key = self._place.rpartition("/")[2]
        return hashlib.sha256(f"{key}/{name}\n".encode() + body).hexdigest().encode()


def machine_here() -> tuple[int, int]:
    """(number of this machine, number of machines), as torchrun's agent tells ranks. Where a cluster sets the
    variables of a rank alone, all machines are taken to have as many ranks; without any there is one machine.
    """

    def number(name: str, default: int) -> int:
        return int(os.environ.get(name, default))

    here = number("LOCAL_WORLD_SIZE", 1)
    machine, size = number("RANK", 0) // here, max(1, number("WORLD_SIZE", 1) // here)
    return number("GROUP_RANK", machine), number("GROUP_WORLD_SIZE", size)


def _name(number: int) -> str:
    return f"{number:06}"


@contextmanager
def _of_the_key() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        todo = "wait for it and run again" if isinstance(error, UnavailableError) else "mend it"
        raise type(error)(f"data.cache: {error}; {todo}, or set data.cache=auto") from None
