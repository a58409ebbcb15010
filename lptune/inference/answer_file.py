"""The file of answers: one JSON object per row, the columns of the row and the answer.

A batch is written when it is answered, in the order of the rows. On several ranks, the batches of a round are
written together (rounds.py). So a job that was stopped or killed keeps
what it has, and the same command continues: it compares the answered rows with those of the source, and
begins with the first batch that is not complete. (A batch is answered as a whole, so that a job gives the
same answers however often it was stopped.)

OUTPUT.settings.json lies beside the file. It names the weights, all settings that decide an answer, and the
versions. A job with other settings does not continue the file.
"""

import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import Signals
from typing import Any, BinaryIO, Self

import torch

from lptune.base.errors import UserError
from lptune.base.files import (
    MAX_BYTES,
    Lock,
    kind_of,
    object_of,
    read_object,
    write_errors,
    write_text,
)
from lptune.data import Prompt
from lptune.distributed import World
from lptune.inference.rounds import Finished, in_batches, rounds
from lptune.launch import preemption

_VERSIONS = "versions"


class AnswerFile:
    """The open file of answers, locked against other jobs. A context manager.

    Only the main rank of `world` opens the file. The other ranks learn from it which prompts have answers.
    column: the key of the answer. settings: what decides the answers, as JSON values; the value of `versions`
    is written but not compared. Raises UserError if the file belongs to a job with other settings or is
    something else.
    """

    def __init__(self, path: Path, column: str, settings: Mapping[str, Any], world: World) -> None:
        path = path.expanduser()
        self.path, self._column, self._world = path, column, world
        self._settings_path = Path(f"{path.absolute()}.settings.json")
        self.num_answers = 0
        """Number of answers in the file that are known to belong to the rows of the source."""
        if not world.is_main:
            return
        try:
            if (kind := kind_of(path, follow=True)) not in ("", "a file"):
                raise UserError(f"output: {path} is {kind}; give the name of a file")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(Lock(path, follow=True).descriptor, "r+b")  # noqa: SIM115  (by __exit__)
        except BlockingIOError:
            raise UserError(f"output: {path} is being written by another job; choose another") from None
        except OSError as error:
            raise UserError(f"output: {path} cannot be written: {error.strerror}; choose another") from None
        try:
            self._check_settings(json.loads(json.dumps(settings)))
        except UserError:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._world.is_main:
            with suppress(OSError):  # what it still holds could not be written, which `write` has said
                self._file.close()

    def rounds(self, prompts: Iterable[Prompt], size: int) -> Iterator[list[Sequence[Prompt]]]:
        """Yields the prompts that have no answer in the file: one batch of `size` for each rank, as
        `rounds.rounds` does. Write the answers of each round before the next one is asked for.

        Raises UserError if the answered rows are not the first rows of the source. A collective.
        """
        batches = in_batches(self._without_column(prompts), size)
        num_batches, first = self._skip_answered(batches) if self._world.is_main else (0, [])
        counts = torch.tensor([num_batches, self.num_answers], device=self._world.device)
        num_batches, self.num_answers = map(int, self._world.sums(counts))
        if not self._world.is_main:
            first = next(itertools.islice(batches, num_batches, None), [])
        if first:
            yield from rounds(itertools.chain([first], batches), self._world)

    def write(self, batches: Sequence[Sequence[Prompt]], answers: Sequence[Sequence[Finished]]) -> None:
        """Appends the answers of a round, on the main rank. Raises UserError if the disk does not take
        them.
        """
        lines = [
            _json({**prompt.row.values, self._column: answer.text}, prompt)
            for batch, of_batch in zip(batches, answers, strict=True)
            for prompt, answer in zip(batch, of_batch, strict=True)
        ]
        if self._world.is_main:
            todo = f"it keeps {self.num_answers:,} answers, and the same command continues"
            with write_errors(f"output: {self.path}", todo):
                self._file.write(b"".join(lines))
                self._file.flush()
                os.fsync(self._file.fileno())  # a network disk says only now that it is full
        self.num_answers += len(lines)

    def stopped(self, by: Signals) -> SystemExit:
        """The exception to raise when the signal `by` stopped the job: exit code 143. Prints a line."""
        if self._world.is_main:
            print(
                f"stopped by {by.name}: {self.path} has {self.num_answers:,} answers; run again to continue",
                file=sys.stderr,
                flush=True,
            )
        return SystemExit(preemption.STOPPED)

    def _without_column(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        for prompt in prompts:
            if self._column in prompt.row.values:
                raise UserError(
                    f"{prompt.row.place}: has a column {self._column!r}, the key of the answer; set "
                    "answer_column to another name"
                )
            yield prompt

    def _skip_answered(self, batches: Iterator[list[Prompt]]) -> tuple[int, list[Prompt]]:
        """The number of batches whose answers are complete, and the batch after them, if there is one. What
        follows the complete batches in the file is removed.
        """
        num_complete = 0
        for batch in batches:
            end = self._file.tell()
            if not all(self._has_answer(prompt) for prompt in batch):
                self._file.seek(end)
                self._file.truncate()
                return num_complete, batch
            num_complete, self.num_answers = num_complete + 1, self.num_answers + len(batch)
        if self._file.read(1):
            raise UserError(
                f"output: {self.path} has more answers than prompts.source has rows; choose another output"
            )
        return num_complete, []

    def _has_answer(self, prompt: Prompt) -> bool:
        row = _json(prompt.row.values, prompt)
        line = self._file.readline(len(row) + MAX_BYTES)  # no answer is longer
        if not line.endswith(b"\n"):
            return False
        found = object_of(line) or {}
        answer = found.pop(self._column, None)
        if not isinstance(answer, str) or _json(found, prompt) != row:
            raise UserError(
                f"output: {self.path}: an answer is not that of {prompt.row.place}; the source has changed "
                "since, or something else wrote there: choose another output"
            )
        return True

    def _check_settings(self, settings: dict[str, Any]) -> None:
        if self._file.seek(0, os.SEEK_END) == 0:
            with write_errors(f"output: {self._settings_path}", "choose another output"):
                write_text(self._settings_path, json.dumps(settings, indent=1) + "\n")
            return
        self._file.seek(0)
        try:
            found = read_object(self._settings_path)
        except UserError:
            raise UserError(
                f"output: {self.path} has content, and {self._settings_path.name} beside it does not say "
                "that it has answers of this job; choose another"
            ) from None
        keys = (found.keys() | settings.keys()) - {_VERSIONS}
        changed = sorted(key for key in keys if found.get(key) != settings.get(key))
        if changed:
            raise UserError(
                f"output: {self.path} has answers that were made with other settings ({', '.join(changed)}); "
                "choose another output, or remove it"
            )


def _json(values: Mapping[str, Any], prompt: Prompt) -> bytes:
    try:
        return (json.dumps(values, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
        return (json.dumps(values) + "\n").encode()
    except TypeError as error:
        raise UserError(
            f"{prompt.row.place}: a column cannot be written as JSON: {error}; convert the source to .jsonl"
        ) from None
