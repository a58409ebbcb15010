"""The fastest configuration of a kernel on this device: measured once, kept on disk.

The key of a choice has the exact sizes of the weight, but only the bucket of the number of tokens: that
number changes from batch to batch, and would cause a new measurement each time. `bucket` rounds it up to a
power of two.

Choices are kept in the folder of `lptune.base.cache`, in one JSON file per device, Triton version and
version of the kernel sources. If a file cannot be read or written, the choice is measured again; a run never
fails for it.

A choice changes nothing but time: all configurations of a kernel add in the same order (gemm.py). So ranks
with different choices, and a resumed run that measures again, get the same bits. `LPTUNE_AUTOTUNE=0` takes
the first configuration without measuring.
"""

import functools
import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from lptune.base import cache
from lptune.base.files import parse_json

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=tuple[int, ...])


class Tuner:
    """Measures and remembers choices for one device. time_s: returns the time of a call, in any unit.

    prepare: called with all calls before they are measured one by one, to compile them.
    """

    def __init__(
        self,
        path: Path,
        time_s: Callable[[Callable[[], object]], float],
        prepare: Callable[[Sequence[Callable[[], object]]], object] = lambda runs: None,
    ) -> None:
        self._path = path
        self._time_s = time_s
        self._prepare = prepare
        self._choices: dict[str, list[int]] = _read(path)
        self._can_write = True

    def known(self, key: str, configs: Sequence[Config]) -> Config | None:
        """The choice for `key` that this or an earlier process measured; None without one."""
        choice = self._choices.get(key)
        # None of them: the file names a configuration of another version.
        return next((config for config in configs if choice == list(config)), None)

    def choose(self, key: str, configs: Sequence[Config], run: Callable[[Config], object]) -> Config:
        """The fastest of `configs` for `key`. A configuration that raises is left out; if all raise, the
        first error is raised.
        """
        known = self.known(key, configs)
        if known is not None:
            return known
        best, best_time, errors = None, math.inf, []
        runs = [functools.partial(run, config) for config in configs]
        self._prepare(runs)
        for config, each in zip(configs, runs, strict=True):
            try:
                # Raised, for example, if the device lacks the shared memory.
                time = self._time_s(each)
            except Exception as error:
                logger.debug("%s: %s is left out: %s", key, config, error)
                errors.append(error)
                continue
            if best is None or time < best_time:
                best, best_time = config, time
        if best is None:
            raise errors[0]
        logger.debug("%s: %s", key, best)
        self._choices[key] = list(best)
        self._write()
        return best

    def _write(self) -> None:
        if not self._can_write:
            return
        try:
            # Other ranks measure, too: their choices are kept, and the file is replaced as a whole.
            merged = _read(self._path) | self._choices
            cache.write(self._path, json.dumps(dict(sorted(merged.items())), indent=0).encode())
        except OSError as error:
            self._can_write = False
            logger.warning("tuned kernel choices cannot be kept, the next run measures again: %s", error)


def bucket(num_tokens: int) -> int:
    """The smallest power of two that is at least `num_tokens`."""
    return 1 << max(num_tokens - 1, 0).bit_length()


def cache_path(device_name: str, triton_version: str) -> Path:
    """The file of the choices for this device, Triton version and kernel sources."""
    source = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        source.update(file.read_bytes())
    device = "".join(c if c.isalnum() else "-" for c in device_name)
    return cache.folder() / f"triton-{device}-{triton_version}-{source.hexdigest()[:16]}.json"


def _read(path: Path) -> dict[str, list[int]]:
    try:
        choices: dict[str, list[int]] = parse_json(cache.read(path) or b"{}")
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read, kernels are measured again: %s", path, error)
        return {}
    return choices
