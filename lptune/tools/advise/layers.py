"""The linear layers of a model by shape. Layers that read one input are one group, and are timed together.

q, k and v read one x, and so do gate and up: in low precision x is quantized once for all of them. Timed one
by one, each would pay for it, and low precision would look slower than it is in a step. Groups with the same
shapes are timed once and counted.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from lptune import linear


class Shape(NamedTuple):
    """A linear layer: K in_features, N out_features."""

    name: str
    """The last component of its name: `q_proj`."""
    in_features: int
    out_features: int
    has_bias: bool


@dataclass(frozen=True)
class Group:
    """Linear layers that read one input, and how often the model has them."""

    shapes: tuple[Shape, ...]
    modules: tuple[str, ...]
    """The names of the modules that hold them: `model.layers.0.self_attn`."""

    @property
    def count(self) -> int:
        """How often the model has the group."""
        return len(self.modules)

    @property
    def label(self) -> str:
        """The names without what they share: `q,k,v`, `down`."""
        return ",".join(shape.name.removesuffix("_proj") for shape in self.shapes)

    @property
    def num_weights(self) -> int:
        """Number of weights of one group, without biases."""
        return sum(shape.in_features * shape.out_features for shape in self.shapes)

    @property
    def out_text(self) -> str:
        """The output sizes, equal ones counted: `2048+2x1024`."""
        sizes = [shape.out_features for shape in self.shapes]
        counts = {size: sizes.count(size) for size in sizes}
        return "+".join(f"{count}x{size}" if count > 1 else f"{size}" for size, count in counts.items())

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The full names of all its layers."""
        return tuple(f"{module}.{shape.name}" for module in self.modules for shape in self.shapes)


def groups_of(model: nn.Module, plan: linear.Plan) -> list[Group]:
    """The groups of the layers that `plan` converted, those with the most FLOPs in a model first.

    model: the one that was converted, also on meta.
    """
    converted = {layer.name for layer in plan.converted}
    found: dict[tuple[Shape, ...], list[str]] = {}
    for name, module in model.named_modules():
        children = {leaf: child for leaf, child in module.named_children() if isinstance(child, nn.Linear)}
        names = [leaf for leaf in children if f"{name}.{leaf}".lstrip(".") in converted]
        for together in _together(names):
            shapes = tuple(_shape(leaf, children[leaf]) for leaf in together)
            found.setdefault(shapes, []).append(name)
    groups = [Group(shapes, tuple(modules)) for shapes, modules in found.items()]
    return sorted(groups, key=lambda group: -group.num_weights * group.count)


def skip_patterns(slow: Iterable[Group], others: Iterable[Group]) -> tuple[str, ...]:
    """Patterns for `precision.skip` that match the layers of `slow` and none of `others`.

    A layer name without its module (`k_proj`), or with the number of the block where only some blocks have
    this shape.
    """
    slow = list(slow)
    taken = {name for group in others for name in group.layer_names}
    leaves_taken = {name.rpartition(".")[2] for name in taken}
    found: dict[str, None] = {}
    for group in slow:
        for name in group.layer_names:
            leaf = name.rpartition(".")[2]
            found[leaf if leaf not in leaves_taken else re.sub(r"^model\.", "", name)] = None
    return tuple(found)


def _shape(name: str, module: nn.Linear) -> Shape:
    return Shape(name, module.in_features, module.out_features, module.bias is not None)


def _together(names: list[str]) -> list[list[str]]:
    """`names` of one module, by the input that they read."""
    groups: list[list[str]] = []
    left = list(names)
    for readers in linear.READ_ONE_INPUT:
        group = [name for name in readers if name in left]
        if group:
            groups.append(group)
            left = [name for name in left if name not in group]
    return [*groups, *([name] for name in left)]
