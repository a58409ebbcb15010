"""Task files of lm_eval: what in them would run code.

A task is a YAML file, and lm_eval runs code that it names: functions (`!function`), classes, metrics that it
downloads from the hub (`hf_evaluate`, or a name that it does not know), and jinja templates, which can reach
Python. The library `datasets` has builders that unpickle files or query a database, which a task may name as
its data. The functions here read the YAML as a graph of nodes and make no object of it, so that a file is
checked before lm_eval reads it. A rule holds wherever a key stands, because YAML can merge a part of a file
into another (`<<`).
"""

from collections.abc import Collection, Iterator
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from lptune.config import MEBI, UserError, read_text

_PLAIN = "tag:yaml.org,2002:"
_MAX_CHARS = 16 * MEBI
# Builders of datasets (4 and 5) that take files of a task and do more than read rows from them.
_BUILDERS = ("cache", "generator", "harbor", "iceberg", "pandas", "spark", "sql", "webdataset")


def check_has_no_code(folder: Path, metrics: Collection[str]) -> None:
    """Raises UserError, with file and line, if a YAML file in `folder`, or one that such a file includes,
    names code. metrics: names of the metrics that lm_eval has.
    """
    waiting, seen = sorted(folder.glob("**/*.yaml")), set[Path]()
    while waiting:
        path = waiting.pop().resolve()
        if path in seen:
            continue
        seen.add(path)
        try:
            root = yaml.compose(read_text(path, _MAX_CHARS), Loader=yaml.SafeLoader)
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            first, *_ = str(error).splitlines()
            raise UserError(f"harness.task_folder: {path}: cannot be read as YAML: {first}") from None
        for node, what in _code(root, metrics):
            raise UserError(
                f"harness.task_folder: {path}, line {node.start_mark.line + 1}: {what}; if you trust this "
                "folder like a program, set harness.run_task_code=true"
            )
        waiting += [path.parent / name for name in _included(root)]


def _code(root: yaml.Node | None, metrics: Collection[str]) -> Iterator[tuple[yaml.Node, str]]:
    for node in _nodes(root):
        if not node.tag.startswith(_PLAIN) or "python" in node.tag:
            yield node, f"{node.tag} runs code"
        for key, value in node.value if isinstance(node, yaml.MappingNode) else []:
            is_set = str(value.value).lower() not in ("", "false", "no", "off")
            if key.value == "class":
                yield value, "class names Python code"
            elif key.value == "hf_evaluate" and is_set:
                yield value, "hf_evaluate runs code of the hub"
            elif key.value == "metric" and str(value.value) not in metrics:
                yield value, f"lm_eval has no metric {value.value!r:.60}, and would run code of the hub"
            elif key.value == "use_prompt":
                yield value, "use_prompt reads prompts of another file or package"
            elif key.value == "dataset_path" and str(value.value).lower() in _BUILDERS:
                yield value, f"dataset_path {value.value!r} can unpickle files or run queries"
            elif key.value == "unsafe_code" and is_set:
                yield value, "unsafe_code runs what the model writes"


def _included(root: yaml.Node | None) -> list[str]:
    return [
        each.value
        for node in _nodes(root)
        if isinstance(node, yaml.MappingNode)
        for key, value in node.value
        if key.value == "include"
        for each in _nodes(value)
        if isinstance(each, yaml.ScalarNode)
    ]


def _nodes(root: yaml.Node | None) -> Iterator[yaml.Node]:
    """All nodes, each once: an alias is the node that it names."""
    waiting, seen = [root] if root is not None else [], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.MappingNode):
            waiting += [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
