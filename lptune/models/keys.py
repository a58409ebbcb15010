"""Typed access to config.json, with the defaults of a family. A wrong value raises a UserError of one line.

A missing key has the default of transformers for that family. A key with the value `null` stays null. For
example, Mistral's window is 4096 if the key is missing, and there is no window if the key is null.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lptune.base.errors import UserError
from lptune.base.files import MEBI, kind_of, read_object

_MAX_BYTES = 16 * MEBI
_LARGEST = sys.float_info.max
MAX_INTEGER = 2**28
"""Far above any size in use, but the product of two such sizes is still a valid number of elements."""


class Keys:
    """The keys of one config.json, or of an object in it. Each method checks the type that it returns."""

    def __init__(self, content: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self.given = dict(content)
        """The keys and values of the file, without defaults."""
        self.where = where
        """The name of the file in messages."""
        self._values = {**defaults, **content}

    @classmethod
    def from_file(cls, path: Path) -> "Keys":
        """The keys of a file. Raises UserError for a missing file, broken JSON, or JSON that is no object."""
        if not kind_of(path, follow=True):
            raise UserError(f"{path}: not found; expected the folder of a Hugging Face checkpoint")
        return cls(read_object(path, max_bytes=_MAX_BYTES, todo="download it again"), {}, str(path))

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Keys":
        """The keys of the same file with the defaults of a family."""
        return Keys(self.given, defaults, self.where)

    def error(self, key: str, problem: str) -> UserError:
        """A UserError with the message `<file>: <key>: <problem>`, for the caller to raise."""
        return UserError(f"{self.where}: {key}: {problem}")

    def get(self, key: str) -> Any:
        """The unchecked value or default; None if there is neither."""
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """Whether there is a value or a default, even if it is null."""
        return key in self._values

    def optional_integer(self, key: str) -> int | None:
        """The value: an integer above 0, or None for null. Raises UserError for another value."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, f"expected an integer above 0, found {value!r}")
        if value > MAX_INTEGER:
            raise self.error(key, f"{value} is larger than any model has; download the file again")
        return value

    def integer(self, key: str) -> int:
        """The value, an integer above 0. Raises UserError for another value."""
        value = self.optional_integer(key)
        if value is None:
            raise self.error(key, "expected an integer above 0, found null")
        return value

    def count(self, key: str) -> int:
        """The value, an integer from 0. Raises UserError for another value."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(key, f"expected an integer, 0 or above, found {value!r}")
        return value

    def optional_number(self, key: str) -> float | None:
        """The value: a finite number above 0, or None for null. Raises UserError for another value."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
            raise self.error(key, f"expected a number above 0, found {value!r}")
        return float(value)

    def number(self, key: str) -> float:
        """The value, a finite number above 0. Raises UserError for another value."""
        value = self.optional_number(key)
        if value is None:
            raise self.error(key, "expected a number above 0, found null")
        return value

    def flag(self, key: str) -> bool:
        """The value, true or false; null counts as false. Raises UserError for another value."""
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise self.error(key, f"expected true or false, found {value!r}")
        return bool(value)

    def text(self, key: str) -> str:
        """The value, a string. Raises UserError for another value."""
        value = self.get(key)
        if not isinstance(value, str):
            raise self.error(key, f"expected a string, found {value!r}")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """The value, a list of numbers above 0. Raises UserError for another value."""
        value = self.get(key)
        if not isinstance(value, list) or not all(
            isinstance(x, int | float) and not isinstance(x, bool) and 0 < x <= _LARGEST for x in value
        ):
            raise self.error(key, "expected a list of numbers above 0")
        return tuple(float(x) for x in value)

    def check_architectures(self) -> None:
        """Raises UserError unless the file names a causal language model, or none."""
        names = self.get("architectures")
        if names and not isinstance(names, list):
            raise self.error("architectures", f"expected a list of names, found {names!r}")
        if names and not any(str(name).endswith("ForCausalLM") for name in names):
            raise self.error("architectures", f"expected a ...ForCausalLM checkpoint, found {names}")

    def refuse(self, key: str, problem: str) -> None:
        """Raises UserError unless the value is null, false, 0 or empty."""
        if self.get(key):
            raise self.error(key, problem)
