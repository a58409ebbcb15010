"""Which boxes of which stored tensors each parameter of a transformers model is made of.

transformers loads many checkpoints by a table: it renames tensors, stacks experts that are stored one by one,
and joins gate and up. The table's own functions say for each stored name which parameter it belongs to; what
its operations do to the values is followed here as boxes (`Part`), so that a rank reads only what it holds,
and an export stores what the base stored. An operation that makes no boxes is refused by name.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lptune.base.errors import UserError
from lptune.models.backbone import Part

_OF_TEXT = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?")


def map_names(
    model: Any, shapes: Mapping[str, tuple[int, ...]], *, is_part: bool = False
) -> dict[str, list[Part]]:
    """Parameter or buffer of `model` -> its parts, for the stored tensors with these shapes. Tensors that
    belong to neither are left out. model: of transformers. is_part: the folder is of a larger model, whose
    text part has a prefix. Raises UserError for a layout without boxes.
    """
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    table = get_model_conversion_mapping(model)
    renamings = [each for each in table if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in table if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known = model.state_dict()

    def whole(name: str, stored: str) -> list[Part]:
        # The parameter's own shape, so that another one in the file is named.
        shape = tuple(known[name].shape)
        return [Part(stored, (0,) * len(shape), shape)]

    prefix = model.base_model_prefix
    found: dict[str, list[Part]] = {}
    gathered: dict[str, dict[str, list[str]]] = {}
    for stored in sorted(shapes, key=loading.dot_natural_key):
        text = _OF_TEXT.sub("", stored) if is_part else stored
        text = f"model.{text}" if text != stored and not text.startswith("lm_head.") else text
        if text in known:
            found[text] = whole(text, stored)
            continue
        name, pattern = loading.rename_source_key(text, renamings, converters, prefix, known)
        if pattern is not None:
            gathered.setdefault(name, {}).setdefault(pattern, []).append(stored)
        elif name in known:
            found[name] = whole(name, stored)
    for name, sources in gathered.items():
        converter = by_pattern[next(iter(sources))]
        boxes = {
            pattern: [_whole(stored, shapes[stored]) for stored in sources[pattern]]
            for pattern in converter.source_patterns
            if pattern in sources
        }
        if name in known:
            found[name] = _follow(name, boxes, converter)
            reached = tuple(
                max(part.start[dim] + part.sizes[dim] for part in found[name])
                for dim in range(len(found[name][0].sizes))
            )
            if reached != tuple(known[name].shape) or len({len(each) for each in boxes.values()}) > 1:
                raise UserError(
                    f"model.path: the tensors of {name} have the shape {list(reached)} together, config.json "
                    f"asks for {list(known[name].shape)}; one is missing, or they do not belong together"
                )
    return found


def _whole(stored: str, shape: tuple[int, ...]) -> Part:
    return Part(stored, (0,) * len(shape), shape, dims=tuple(range(len(shape))))


def _follow(name: str, boxes: dict[str, list[Part]], converter: Any) -> list[Part]:
    """The boxes after the operations of `converter`. boxes: by pattern, in the order of the patterns."""
    for operation in converter.operations:
        kind = type(operation).__name__
        if kind == "MergeModulelist":
            boxes = {pattern: _stacked(each, operation.dim) for pattern, each in boxes.items()}
        elif kind == "Concatenate":
            boxes = {name: _joined(boxes.values(), operation.dim)}
        elif kind == "Transpose" and not operation.check_dims:
            boxes = {
                pattern: [_turned(box, operation.dim0, operation.dim1) for box in each]
                for pattern, each in boxes.items()
            }
        else:
            raise UserError(
                f"model.path: {name} is stored in a layout that lptune cannot read ({kind} in transformers); "
                "save the model with a layout of its own, or choose another checkpoint"
            )
    if len(boxes) != 1 or len(converter.target_patterns) != 1:
        raise UserError(f"model.path: {name} is one of several that are stored as one; lptune cannot read it")
    return next(iter(boxes.values()))


def _stacked(boxes: list[Part], dim: int) -> list[Part]:
    """The same boxes one after the other along a new dimension."""
    return [
        box._replace(
            start=(*box.start[:dim], number, *box.start[dim:]),
            sizes=(*box.sizes[:dim], 1, *box.sizes[dim:]),
            dims=(*box.dims[:dim], None, *box.dims[dim:]),
        )
        for number, box in enumerate(boxes)
    ]


def _joined(groups: Iterable[list[Part]], dim: int) -> list[Part]:
    """Groups of boxes one after the other along `dim`. Each group fills what its boxes reach."""
    found, first = list[Part](), 0
    for group in groups:
        for box in group:
            start = (*box.start[:dim], box.start[dim] + first, *box.start[dim + 1 :])
            found.append(box._replace(start=start))
        first += max(box.start[dim] + box.sizes[dim] for box in group)
    return found


def _turned(box: Part, one: int, other: int) -> Part:
    order = list(range(len(box.sizes)))
    order[one], order[other] = other, one
    return box._replace(
        start=tuple(box.start[i] for i in order),
        sizes=tuple(box.sizes[i] for i in order),
        dims=tuple(box.dims[i] for i in order),
    )
