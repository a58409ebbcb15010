"""Names of layers that differ only in the number of their block: `model.layers.0-27.mlp.up_proj`."""

import re
from collections.abc import Sequence


def without_number(name: str) -> str:
    """The name of a layer for all blocks: `layers.7.mlp.up_proj` -> `layers.#.mlp.up_proj`."""
    return re.sub(r"\.[0-9]+\.", ".#.", name, count=1)


def number_of(name: str) -> int | None:
    """The number of a layer's block, 7 of `model.layers.7.mlp.up_proj`; None if it has none."""
    found = re.search(r"\.([0-9]{1,9})\.", name)
    return int(found[1]) if found else None


def group_name(names: Sequence[str]) -> str:
    """The name of one layer, or of several that differ in their first number: `layers.0-27.mlp.up_proj`."""
    numbers = sorted({number for name in names if (number := number_of(name)) is not None})
    if len(names) == 1 or len(numbers) != len(names):
        return names[0]
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    ranges = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return without_number(names[0]).replace(".#.", f".{ranges}.", 1)
