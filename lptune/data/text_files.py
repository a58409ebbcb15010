"""Reads text files lazily: lines, and the values of a JSON text one after the other.

A file is never in memory as a whole, unless it is a single value. A line, or a value, has at most
MAX_ROW_BYTES: what has more is no row, and would fill the memory. An error in a file is raised when reading
gets there, after the rows before it were read.
"""

import codecs
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lptune.base.errors import UserError
from lptune.base.files import MEBI, LongLineError, raw_lines

CHUNK_BYTES = 1024 * 1024
MAX_ROW_BYTES = 1024 * MEBI
"""Of a line, of a value in a JSON text, and of a file that is one text. Far above any document."""


def read_text(source: str, path: Path) -> str:
    """The whole file, with line feeds as line breaks. Raises the same errors as `lines`."""
    try:
        with _open(source, path) as file:
            # The size is asked first: `read` with a limit would ask for so much memory for each small file.
            if os.fstat(file.fileno()).st_size > MAX_ROW_BYTES:
                raise UserError(
                    f"{source}: is one text of more than {MAX_ROW_BYTES:,} bytes; cut it into rows"
                )
            text = file.read().decode()
    except UnicodeDecodeError:
        for _ in lines(source, path):  # which finds the line
            pass
        raise
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror or error}") from None
    return text.replace("\r\n", "\n")


def lines(source: str, path: Path) -> Iterator[str]:
    """The lines of the file, each with its line feed (CRLF is one).

    source: the name in messages. Raises UserError for a file that is empty, not UTF-8, or unreadable.
    """
    try:
        with _open(source, path) as file:
            number = 0
            for number, raw in enumerate(raw_lines(file, MAX_ROW_BYTES), 1):
                try:
                    line = raw.decode()
                except UnicodeDecodeError as error:
                    byte = raw[error.start]
                    raise UserError(
                        f"{source} line {number}: not UTF-8 text (byte 0x{byte:02x}); save the file as UTF-8"
                    ) from None
                yield f"{line[:-2]}\n" if line.endswith("\r\n") else line
    except LongLineError as error:
        raise UserError(f"{source} line {number + 1}: {error}; cut it into rows") from None
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror or error}") from None


def _open(source: str, path: Path) -> BinaryIO:
    """Opens the file, at its first character (after a byte order mark)."""
    file = path.open("rb")
    try:
        head = file.read(3)
        if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise UserError(f"{source}: is UTF-16 text; save it as UTF-8")
        start = len(head) if head == codecs.BOM_UTF8 else 0
        file.seek(start)
        while (chunk := file.read(CHUNK_BYTES)) and chunk.isspace():
            pass
        if not chunk:
            raise UserError(f"{source}: is empty; give data.source rows to train on")
        file.seek(start)
    except BaseException:
        file.close()
        raise
    return file


class JsonFloat(float):
    """A number of JSON with a fraction or an exponent, and its text: 1.10 is no other number than 1.1, but
    another answer.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


DECODER = json.JSONDecoder(parse_float=JsonFloat)


class JsonText:
    """Parses the values of a JSON text one by one, with only a window of the text in memory."""

    def __init__(self, source: str, path: Path) -> None:
        self._source, self._path = source, path
        self._file = _open(source, path)
        self._bytes = codecs.getincrementaldecoder("utf-8")()
        self._decoder = DECODER
        self._text, self._at, self._ended = "", 0, False
        self._line, self._column = 1, 0  # of the window's first character

    def close(self) -> None:
        """Closes the file that is read."""
        self._file.close()

    def next_character(self) -> str:
        """The next character that is not white space, without passing it; empty at the end."""
        while True:
            self._at = _NO_SPACE.search(self._text, self._at).start()  # type: ignore[union-attr]
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read_on()

    def skip(self, character: str) -> None:
        """Passes `character`. Raises UserError if it is not the next one."""
        if self.next_character() != character:
            raise self._error(
                json.JSONDecodeError(f"Expecting {character!r} delimiter", self._text, self._at)
            )
        self._at += 1

    def value(self) -> Any:
        """Parses the value that begins at the next character. Raises UserError if it is not valid."""
        self.next_character()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended:
                    raise self._error(error) from None
            except (ValueError, RecursionError):
                raise UserError(
                    f"{self._source}: not valid JSON: nested too deeply, or a number of thousands of digits; "
                    "fix the file"
                ) from None
            else:
                if end < len(self._text) or self._ended:  # otherwise it may be half of a number
                    self._at = end
                    return value
            if len(self._text) - self._at > MAX_ROW_BYTES:
                raise UserError(
                    f"{self._source} line {self._line}: a value is longer than {MAX_ROW_BYTES:,} characters; "
                    "cut it into rows"
                )
            self._read_on()

    def elements(self) -> Iterator[Any]:
        """The elements of the list that begins at the next character; no text may follow the list."""
        self.skip("[")
        if self.next_character() != "]":
            yield self.value()
            while self.next_character() != "]":
                self.skip(",")
                yield self.value()
        self.skip("]")
        if self.next_character():
            raise self.extra_data()

    def extra_data(self) -> UserError:
        """The error for text after the end of the JSON value."""
        return self._error(json.JSONDecodeError("Extra data", self._text, self._at))

    def _error(self, error: json.JSONDecodeError) -> UserError:
        """A UserError with the problem and its place in the file."""
        line = self._line + self._text.count("\n", 0, error.pos)
        before = self._text.rfind("\n", 0, error.pos)
        column = error.pos - before if before >= 0 else self._column + error.pos + 1
        problem = f"{error.msg.removesuffix(' at')} at column {column}"
        return UserError(f"{self._source} line {line}: not valid JSON: {problem}; fix the file")

    def _read_on(self) -> None:
        """Drops what was parsed and reads as much again as is left, so that no value is parsed often."""
        done, self._text = self._text[: self._at], self._text[self._at :]
        self._line += done.count("\n")
        self._column = len(done) - done.rfind("\n") - 1 + (self._column if "\n" not in done else 0)
        self._at = 0
        try:
            raw = self._file.read(max(CHUNK_BYTES, len(self._text)))
            self._text += self._bytes.decode(raw, final=not raw)
        except UnicodeDecodeError:
            for _ in lines(self._source, self._path):  # finds the line with the error
                pass
            raise
        except OSError as error:
            raise UserError(f"{self._source}: cannot be read: {error.strerror or error}") from None
        self._ended = not raw


_NO_SPACE = re.compile(r"[^ \t\n\r]|\Z")
