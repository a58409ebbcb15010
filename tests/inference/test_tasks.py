"""Tasks of lm_eval where it is missing, and what of a task file would run code. Needs no lm_eval."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from lptune import data, distributed
from lptune.base.errors import UserError
from lptune.config import HarnessConfig
from lptune.inference import read_tasks
from lptune.inference.task_files import check_has_no_code
from tests.helpers.tiny_recipe import make_checkpoint


@pytest.fixture(scope="module")
def world() -> Iterator[distributed.World]:
    with distributed.session("cpu") as world:
        yield world


def test_without_lm_eval_one_line_says_what_to_install(
    tmp_path: Path, world: distributed.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = data.load_tokenizer(make_checkpoint(tmp_path / "tiny"))
    assert read_tasks(HarnessConfig(), tokenizer, world) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = r"harness.tasks: lm_eval is not installed; (run: .*lm-eval|install the packages)"
    with pytest.raises(UserError, match=line):
        read_tasks(HarnessConfig(tasks=("hellaswag",)), tokenizer, world)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("doc_to_text: !function utils.text", "line 1: !function runs code"),
        ("a: [{b: &x !function u.f}]\nc: *x", "line 1: !function runs code"),
        ("a: 1\nb: !!python/object/apply:os.system [ls]", "line 2: tag:yaml.org,2002:python/object/apply"),
        ("a: 1\nclass: Task", "line 2: class names Python code"),
        ("task: x\nmetric_list: [{metric: mine}]", "lm_eval has no metric 'mine'"),
        ("metric_list: [{metric: [acc]}]", "lm_eval has no metric"),
        ("metric_list:\n- metric: acc\n  hf_evaluate: yes", "line 3: hf_evaluate runs code of the hub"),
        ("unsafe_code: true", "unsafe_code decides whether code runs"),
        (
            "group: g\ntask: [{task: cruxeval_input, dataset_path: json}]",
            "line 2: changes the task 'cruxeval",
        ),
        (
            "group: g\ntask: [cruxeval_input]\ndataset_path: json",
            "line 2: may change the task 'cruxeval_input'",
        ),
        ("task: [a_task]\n<<: {dataset_path: json}", "may change the task 'a_task'"),
        ("dataset_path: json\n<<: {task: [a_task]}", "may change the task 'a_task'"),
        ("include: sub/group.inc\ndataset_path: json", "group.inc, line 1: may change the task 'a_task'"),
        ("task: [[a_task]]", "is neither the name of a task nor a task"),
        ("use_prompt: promptsource:x", "use_prompt reads prompts"),
        ("include: [sub/safe.inc, sub/code.inc]", "code.inc, line 2: !function runs code"),
        ("<<: {include: sub/code.inc}", "code.inc, line 2: !function runs code"),
        ("<<: [{a: 1}, &x {include: [sub/code.inc]}]", "code.inc, line 2: !function runs code"),
        ("dataset_path: pandas", "dataset_path 'pandas' can unpickle files"),
        ("<<: {dataset_path: pandas}", "dataset_path 'pandas' can unpickle files"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_a_task_file_that_names_code_is_refused_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/safe.inc").write_text(
        "metric_list: [{metric: acc}]\ninclude: ../task.yaml", encoding="utf-8"
    )
    (tmp_path / "sub/code.inc").write_text("a: 1\nb: !function u.f", encoding="utf-8")
    (tmp_path / "sub/group.inc").write_text("task: [a_task]", encoding="utf-8")
    (tmp_path / "task.yaml").write_text("task: x\nhf_evaluate: false\n", encoding="utf-8")
    (tmp_path / "group.yaml").write_text("group: g\ntask: [x, hellaswag, {task: x, num_fewshot: 2}]\n")
    check_has_no_code(tmp_path, {"acc"})
    (tmp_path / "task.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        check_has_no_code(tmp_path, {"acc"})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_fewshot": 5}, "harness.num_fewshot: needs harness.tasks"),
        ({"task_folder": "tasks"}, "harness.task_folder: needs harness.tasks"),
        ({"tasks": ("a",), "max_length": 1}, "harness.max_length: must be at least 2"),
        ({"tasks": ("a",), "num_fewshot": -1}, "harness.num_fewshot"),
        ({"tasks": ("a",), "output": ""}, "harness.output: is empty"),
    ],
)
def test_wrong_keys_are_one_line(keys: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        HarnessConfig(**keys)  # type: ignore[arg-type]
