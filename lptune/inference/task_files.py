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

from lptune.base.errors import UserError
from lptune.base.files import MEBI, read_text

_PLAIN = "tag:yaml.org,2002:"
_MAX_CHARS = 16 * MEBI
# Builders of datasets (4 and 5) that take files of a task and do more than read rows from them.
_OF_GROUPS = {"group", "task", "group_alias", "aggregate_metric_list", "metadata", "tag"}
"""Keys of a group that change none of its tasks."""
_BUILDERS = ("cache", "generator", "harbor", "iceberg", "pandas", "spark", "sql", "webdataset")


def check_has_no_code(folder: Path, metrics: Collection[str]) -> None:
    """Raises UserError, with file and line, if a YAML file in `folder`, or one that such a file includes,
    names code. metrics: names of the metrics that lm_eval has.
    """
    waiting, roots, included = sorted(folder.glob("**/*.yaml")), dict[Path, yaml.Node | None](), set[Path]()
    while waiting:
        path = waiting.pop().resolve()
        if path in roots:
            continue
        try:
            root = roots[path] = yaml.compose(read_text(path, _MAX_CHARS), Loader=yaml.SafeLoader)
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            first, *_ = str(error).splitlines()
            raise UserError(f"harness.task_folder: {path}: cannot be read as YAML: {first}") from None
        for name in _included(root):
            waiting.append(path.parent / name)
            included.add((path.parent / name).resolve())
    own = {name for root in roots.values() for name in _defined(root)}
    for path, root in roots.items():
        for node, what in (*_code(root, metrics), *_changed_tasks(root, own, path in included)):
            raise UserError(
                f"harness.task_folder: {path}, line {node.start_mark.line + 1}: {what}; if you trust this "
                "folder like a program, set harness.run_task_code=true"
            )


def _defined(root: yaml.Node | None) -> list[str]:
    """The names of the task, the group and the tags that a file defines."""
    return [
        each.value
        for key, value in (root.value if isinstance(root, yaml.MappingNode) else [])
        if key.value in ("task", "group", "tag")
        for each in ([value] if key.value == "task" else _nodes(value))
        if isinstance(each, yaml.ScalarNode)
    ]


def _changed_tasks(
    root: yaml.Node | None, own: Collection[str], is_included: bool
) -> Iterator[tuple[yaml.Node, str]]:
    """Where a group changes a task that is not `own`. A task of lm_eval may run code on its data: with the
    data of a stranger, that is the stranger's code.
    """
    is_merged = any(
        key.value == "<<"
        for node in _nodes(root)
        if isinstance(node, yaml.MappingNode)
        for key, _ in node.value
    )
    for node in _nodes(root):
        keys = {key.value: value for key, value in node.value} if isinstance(node, yaml.MappingNode) else {}
        task = keys.get("task")
        if isinstance(task, yaml.ScalarNode):
            if node is not root and task.value not in own:
                yield task, f"changes the task {task.value!r:.60}, which is not of this folder"
        elif task is not None:
            items = task.value if isinstance(task, yaml.SequenceNode) else [task]
            is_plain = keys.keys() <= _OF_GROUPS and not is_merged and not is_included
            for item in items:
                if not isinstance(item, (yaml.ScalarNode, yaml.MappingNode)):
                    yield item, "is neither the name of a task nor a task"
                elif isinstance(item, yaml.ScalarNode) and item.value not in own and not is_plain:
                    yield item, f"may change the task {item.value!r:.60}, which is not of this folder"


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
            elif key.value == "unsafe_code":
                yield value, "unsafe_code decides whether code runs that the model writes"


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
