"""Which configuration of a kernel is fastest here: measured once, kept on disk.

The choice is keyed by what a shape looks like, not by the shape: the number of tokens changes from batch to
batch, and a key that held it would measure again each time. `bucket` rounds it up to a power of two; the
sizes of the weight are exact.

Choices are kept in the folder of `lptune.kernels.cache`, in one JSON file per device, Triton version and
version of the kernels' source. A file that cannot be read or written costs a measurement, never a run.

A choice changes time and nothing else: every configuration of a kernel adds in the same order (gemm.py), so
ranks that chose differently, or a resumed run that measured again, still get the same bits.
`LPTUNE_AUTOTUNE=0` takes the first configuration and measures nothing.
"""

import functools
import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from lptune.kernels import cache

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=tuple[int, ...])


class Tuner:
    """Choices of one device, measured with `time_s` (of a function without arguments, in any unit).

    prepare: called with all of what is then measured one by one, to compile it.
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
        """What was measured for `key`, here or by an earlier process."""
        choice = self._choices.get(key)
        # Another: the file names a configuration of another version.
        return next((config for config in configs if choice == list(config)), None)

    def choose(self, key: str, configs: Sequence[Config], run: Callable[[Config], object]) -> Config:
        """The fastest of `configs` for `key`. A configuration that raises is out; if all do, the first error
        is raised.
        """
        known = self.known(key, configs)
        if known is not None:
            return known
        best, best_time, errors = None, math.inf, []
        runs = [functools.partial(run, config) for config in configs]
        self._prepare(runs)
        for config, each in zip(configs, runs, strict=True):
            try:
                # A device that lacks the shared memory for a configuration says so here.
                time = self._time_s(each)
            except Exception as error:
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
            # Other ranks have measured too: what they wrote is kept, and the file is replaced as a whole.
            merged = _read(self._path) | self._choices
            cache.write(self._path, json.dumps(dict(sorted(merged.items())), indent=0).encode())
        except OSError as error:
            self._can_write = False
            logger.warning("tuned kernel choices cannot be kept, the next run measures again: %s", error)


def bucket(num_tokens: int) -> int:
    """The power of two at or above `num_tokens`."""
    return 1 << max(num_tokens - 1, 0).bit_length()


def cache_path(device_name: str, triton_version: str) -> Path:
    """Where the choices for this device, this Triton and these kernels are kept."""
    source = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        source.update(file.read_bytes())
    device = "".join(c if c.isalnum() else "-" for c in device_name)
    return cache.folder() / f"triton-{device}-{triton_version}-{source.hexdigest()[:16]}.json"


def _read(path: Path) -> dict[str, list[int]]:
    try:
        content = cache.read(path)
        if content is None:
            return {}
        choices = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read, kernels are measured again: %s", path, error)
        return {}
    if not isinstance(choices, dict):
        logger.warning("%s holds no choices, kernels are measured again", path)
        return {}
    return {key: choice for key, choice in choices.items() if isinstance(choice, list)}
