"""Typed access to config.json: the file's values over a family's defaults, one line for each wrong value.

A key that is missing takes the value that transformers would take for that family. A key that is there with
`null` stays null: Mistral's window is 4096 when the key is missing and switched off when it is null.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lptune.config import MEBI, UserError, read_text

_MAX_CHARS = 16 * MEBI
MAX_INTEGER = 2**28
"""Far above every size in use, and so small that the product of two sizes is a legal number of elements."""


class Keys:
    """The keys of one config.json (or of an object inside it), read with the type that the caller needs."""

    def __init__(self, content: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self.given = dict(content)
        """What the file itself says."""
        self.where = where
        """How messages name the file."""
        self._values = {**defaults, **content}

    @classmethod
    def from_file(cls, path: Path) -> "Keys":
        """Raises UserError for a missing file, broken JSON, or anything but an object."""
        try:
            content = json.loads(read_text(path, _MAX_CHARS))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{path}: not found; expected the folder of a Hugging Face checkpoint") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}: line {error.lineno}: not JSON ({error.msg}); download it again"
            ) from None
        except UnicodeDecodeError:
            raise UserError(f"{path}: not UTF-8 text") from None
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, endless nesting
            raise UserError(f"{path}: cannot be read ({error}); download it again") from None
        if not isinstance(content, dict):
            raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}")
        return cls(content, {}, str(path))

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Keys":
        """The same file over a family's defaults."""
        return Keys(self.given, defaults, self.where)

    def error(self, key: str, problem: str) -> UserError:
        """`<file>: <key>: <problem>`, to be raised."""
        return UserError(f"{self.where}: {key}: {problem}")

    def get(self, key: str) -> Any:
        """The raw value, None when there is neither a value nor a default."""
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """Whether there is a value or a default, be it null."""
        return key in self._values

    def optional_integer(self, key: str) -> int | None:
        """An integer above zero, or None for null."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, f"expected an integer above 0, found {value!r}")
        if value > MAX_INTEGER:
            raise self.error(key, f"{value} is larger than any model has; download the file again")
        return value

    def integer(self, key: str) -> int:
        """An integer above zero."""
        value = self.optional_integer(key)
        if value is None:
            raise self.error(key, "expected an integer above 0, found null")
        return value

    def count(self, key: str) -> int:
        """An integer, zero or above."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(key, f"expected an integer, 0 or above, found {value!r}")
        return value

    def optional_number(self, key: str) -> float | None:
        """A finite number above zero, or None for null."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(key, f"expected a number above 0, found {value!r}")
        return float(value)

    def number(self, key: str) -> float:
        """A finite number above zero."""
        value = self.optional_number(key)
        if value is None:
            raise self.error(key, "expected a number above 0, found null")
        return value

    def flag(self, key: str) -> bool:
        """true or false; null counts as false."""
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise self.error(key, f"expected true or false, found {value!r}")
        return bool(value)

    def text(self, key: str) -> str:
        """A string."""
        value = self.get(key)
        if not isinstance(value, str):
            raise self.error(key, f"expected a string, found {value!r}")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers above zero."""
        value = self.get(key)
        if not isinstance(value, list) or not all(
            isinstance(x, int | float) and not isinstance(x, bool) and x > 0 for x in value
        ):
            raise self.error(key, "expected a list of numbers above 0")
        return tuple(float(x) for x in value)

    def refuse(self, key: str, problem: str) -> None:
        """Raise when the key holds anything but null, false, 0 or an empty value."""
        if self.get(key):
            raise self.error(key, problem)
