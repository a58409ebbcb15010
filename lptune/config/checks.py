"""Checks of values and numbers of ranks; each raises one UserError that names the key, what was found, what
is legal.
"""

import math
import os
import re
import unicodedata
from typing import TYPE_CHECKING

from lptune.base.errors import ChoiceError, UserError, closest
from lptune.config.elsewhere import VALUES

if TYPE_CHECKING:
    from lptune.config.schema import ParallelConfig


_MAX_LISTED = 90
"""Longest list of choices, in characters, that a message has."""


def one_of(key: str, value: str, choices: tuple[str, ...], where: str = "") -> None:
    """Raises ChoiceError unless `value` is one of `choices`; `where` follows them in the message.

    Many choices would hide the rest of the line, so the message then says where they are listed.
    """
    if value not in choices:
        meant = VALUES.get(key, {}).get(value.lower())
        hint = closest(value, choices) if meant is None else f"; here that is {meant}" if meant else ""
        listed = ", ".join(choices)
        if len(listed) > _MAX_LISTED:
            listed, hint = f"its {len(choices)} choices", f"{hint}; `lptune keys {key}` lists them"
        raise ChoiceError(f"{key}: {value!r} is not one of {listed}{where}{hint}", key, choices)


def at_least(key: str, value: float, minimum: float) -> None:
    """Raises UserError unless `value` is finite and at least `minimum`."""
    # The negated form also refuses NaN.
    if not minimum <= value < math.inf:
        raise UserError(
            f"{key}: must be {'finite and ' * (value == math.inf)}at least {minimum}, found {value}"
        )


def num_micro_batches(global_batch_size: int, micro_batch_size: int) -> int:
    """The number of micro-batches of a global batch. Raises UserError if the last one would not be full."""
    if global_batch_size % micro_batch_size:
        raise UserError(
            f"global_batch_size: {global_batch_size} is not a multiple of micro_batch_size "
            f"({micro_batch_size})"
        )
    return global_batch_size // micro_batch_size


def check_path(key: str, value: str) -> None:
    """Raises UserError for a path that is empty, that no file system can hold, or that is not printable text.

    safetensors cannot open a path that is not UTF-8, and a run would notice that after training only. A line
    break in a path would break the line of every message that names the path.
    """
    if not value:
        raise UserError(f"{key}: is empty; name a file or folder")
    whole = value if os.path.isabs(value) else os.path.join(os.getcwd(), value)  # as state.json names it
    if odd := [c for c in whole if unicodedata.category(c) in ("Cc", "Cs")]:
        what = "a byte that is no UTF-8" if unicodedata.category(odd[0]) == "Cs" else "a control character"
        raise UserError(f"{key}: {whole!r:.100}: its path holds {what}; rename it, or choose another")
    if max(map(len, os.fsencode(value).split(b"/"))) > 255:
        raise UserError(f"{key}: is not a path: a name in it is longer than 255 bytes")
    if os.path.expanduser(value).startswith("~"):
        raise UserError(
            f"{key}: {value}: there is no such user's home; write ./{value} for a name that begins with ~"
        )


def check_address(key: str, value: str) -> None:
    """Raises UserError for a text that names no place in object storage: PROTOCOL://PLACE."""
    if not re.fullmatch(r"[a-z0-9+]+://[^\s:]*[^\s:/][^\s:]*", value):
        raise UserError(f"{key}: expected an address like s3://bucket/runs/my-run, found {value!r:.100}")


def positive(key: str, value: float) -> None:
    """Raises UserError unless `value` is finite and greater than 0."""
    if not 0 < value < math.inf:
        raise UserError(f"{key}: must be greater than 0 and finite, found {value}")


def check_average(count: int, every_steps: int, keep_last: int) -> None:
    """Raises UserError if a run does not keep the `count` checkpoints whose mean it is to export."""
    if count > 1 and not every_steps:
        raise UserError(
            f"export.average_checkpoints: {count} checkpoints are needed, and only the last step is "
            "saved; set checkpoint.every_steps"
        )
    if count > max(1, keep_last):
        raise UserError(
            f"export.average_checkpoints: {count} checkpoints must be kept, found checkpoint.keep_last="
            f"{keep_last}; set checkpoint.keep_last={count}"
        )


def mesh_axes(parallel: "ParallelConfig", num_ranks: int) -> dict[str, int]:
    """Names and sizes of the mesh's axes, outermost first. Raises UserError where the ranks do not divide.

    Neighbouring ranks are on one machine, so `tensor`, which exchanges most, is the innermost axis; `fsdp`,
    which gathers weights, comes next; `replicate`, which only reduces gradients, is the outermost. Ranks that
    share rows (`context`) or have the experts among them (`expert`) are neighbours on `fsdp`.
    """
    fixed = parallel.replicate * parallel.tensor * parallel.context * parallel.expert
    if num_ranks % fixed:
        context = f" x context={parallel.context}" * (parallel.context > 1)
        expert = f" x expert={parallel.expert}" * (parallel.expert > 1)
        raise UserError(
            f"parallel: replicate={parallel.replicate} x tensor={parallel.tensor}{context}{expert} needs a "
            f"multiple of {fixed} ranks, found {num_ranks}; change them or the number of ranks"
        )
    sizes = {"replicate": parallel.replicate, "fsdp": num_ranks // parallel.replicate // parallel.tensor}
    sizes["tensor"] = parallel.tensor
    return {name: size for name, size in sizes.items() if size > 1 or name == "fsdp"}


def check_batches(global_batch_size: int, micro_batch_size: int, num_ranks: int) -> None:
    """Raises UserError when the global batch cannot be cut into whole micro-batches, equally many per
    rank.
    """
    num_micro = num_micro_batches(global_batch_size, micro_batch_size)
    if num_micro % num_ranks:
        fitting = ", ".join(str(n) for n in range(1, num_micro + 1) if num_micro % n == 0)
        share, rest = divmod(global_batch_size, num_ranks)
        if rest:
            todo = f"set global_batch_size to a multiple of {num_ranks}"
        else:
            largest = max(n for n in range(1, min(share, micro_batch_size) + 1) if share % n == 0)
            todo = f"set micro_batch_size={largest}"
        raise UserError(
            f"global_batch_size: {global_batch_size} rows in micro-batches of {micro_batch_size} do not "
            f"divide among {num_ranks} data ranks; {todo}, or use one of these numbers of ranks: {fitting}"
        )
