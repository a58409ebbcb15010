"""What weights, gradients and optimizer took in the old run, and take in the new one, where the size of the
model is known: by the name of a checkpoint that a config of lptune downloads.

Tools that hold weights in bf16 alone have gradients and AdamW's moments in bf16, too: 2 + 2 + 4 bytes of each
weight, where float32 takes 4 + 4 + 8. The notes of the draft say which it was.
"""

import re
from collections.abc import Iterator

from lptune.base.text import size_text
from lptune.cli import catalog, ls
from lptune.config import OPTIMIZER_KINDS
from lptune.tools.migrate.draft import Draft

_VARIANT = re.compile(r"^meta-|-(instruct|base|it|chat|hf|v0\.\d)\b")


def memory_lines(draft: Draft, config: str) -> Iterator[str]:
    """The bytes there and here over all ranks, and the command that finds what fits; none where the size of
    the model is not known. config: the new file.
    """
    named = {_plain(ls.hub_id(file)): name for name, file in catalog.configs().items()}
    number = ls.num_weights(named.get(_plain(str(draft.value_of("model.path", "?"))), ""))
    if number is None:
        return
    in_bf16 = any(each.ours == "compute_dtype" and each.note for each in draft.settings)
    there, here, rounded = (
        size_text(int(number * _bytes(draft, *widths)))
        for widths in ((2, 2) if in_bf16 else (4, 4), (4, 4), (2, 4))
    )
    without = f", with optimizer.master=none {rounded}" if in_bf16 else ""
    yield (
        f"weights, gradients and optimizer over all ranks: there about {there}{' in bf16' * in_bf16}, here "
        f"{here}{without}; activations come on top."
    )
    yield f"`lptune plan --config {config} --device GPU --world-size N --write FILE` finds what fits."


def _bytes(draft: Draft, of_weight: int, of_moment: int) -> int:
    """Of each weight, with its gradient and moments; those of 8 bits take 2, those of sgd one at most."""
    kind = str(draft.value_of("optimizer.kind", "adamw"))
    of_kind = OPTIMIZER_KINDS[kind]
    moments = of_kind.num_moments * (1 if of_kind.num_bits == 8 else of_moment)
    if kind == "sgd" and not draft.value_of("optimizer.momentum"):
        moments = 0
    return of_weight + moments + (0 if draft.value_of("optimizer.in_backward") else of_weight)


def _plain(name: str) -> str:
    """The last part of a path or an id without what does not change the size."""
    return _VARIANT.sub("", name.rstrip("/").rpartition("/")[2].lower())
