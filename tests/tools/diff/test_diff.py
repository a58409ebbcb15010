"""What differs between two runs, and where their losses part."""

import json
import math
from pathlib import Path

import pytest

from lptune.tools.diff.sides import TOLERANCE, first_parted, lines, side_of_run
from lptune.tools.report.run import read_run
from lptune.tools.report.summary import differing_keys, labels
from tests.tools.conftest import MakeRun, plan, row


def diff(a: Path, b: Path, width: int = 80) -> str:
    found = list(lines(side_of_run(a), side_of_run(b), width))
    assert max(map(len, found)) <= width
    return "\n".join(found)


@pytest.fixture
def two(make_run: MakeRun) -> tuple[Path, Path]:
    """Two runs that part in their last bits at step 7 and by more than a thousandth at step 20."""
    a = [row(step) for step in range(1, 31)]
    b = [dict(each) for each in a]
    for each in b[6:]:
        each["loss"] = math.nextafter(each["loss"], math.inf)
    for each in b[19:]:
        each["loss"] *= 1 + 2 * TOLERANCE
    a[-1]["eval_loss"], b[-1]["eval_loss"] = 2.5, 2.25
    return make_run("a", a), make_run("b", b)


def test_the_first_steps_where_losses_part(two: tuple[Path, Path]) -> None:
    a, b = map(read_run, two)
    bits, more = first_parted(a, b, "loss", 0.0), first_parted(a, b, "loss", TOLERANCE)
    assert bits is not None
    assert more is not None
    assert (bits.step, more.step) == (7, 20)
    assert bits.b == math.nextafter(bits.a, math.inf)
    assert first_parted(a, a, "loss", 0.0) is None
    text = diff(*two)
    assert " 7 " in next(line for line in text.splitlines() if "first bits that differ" in line)
    assert " 20 " in next(line for line in text.splitlines() if "first difference above 0.001" in line)
    (held_out,) = (line for line in text.splitlines() if "last held-out loss" in line)
    assert held_out.split()[-3:] == ["30", "2.5000", "2.2500"]


@pytest.mark.parametrize(("tolerance", "step"), [(0.0, 2), (0.0099, 2), (0.01005, None)])
def test_the_tolerance_is_relative_to_the_larger_of_the_two(
    make_run: MakeRun, tolerance: float, step: int | None
) -> None:
    a, b = (make_run(name, [row(1), row(2, loss=loss)]) for name, loss in (("a", 100.0), ("b", 99.0)))
    found = first_parted(read_run(a), read_run(b), "loss", tolerance)
    assert (found and found.step) == step


def test_only_steps_that_both_have_are_compared(make_run: MakeRun) -> None:
    a = make_run("a", [row(step) for step in (1, 2, 3)])
    b = make_run("b", [row(step) for step in (2, 3, 4)])
    assert "losses of the 2 steps that both have" in diff(a, b)
    assert "no step has a loss in both" in diff(a, make_run("c", [row(9)]))
    assert "no step has a loss in both" in diff(a, make_run("d", []))


def test_losses_that_are_not_finite_in_both_and_equal_plans_do_not_differ(make_run: MakeRun) -> None:
    files = {"precision_plan__json": plan()}
    a = make_run("a", [row(1, loss=None), row(2, loss=None)], **files)
    b = make_run("b", [row(1, loss=None), row(2, loss=1.0)], **files)
    found = first_parted(read_run(a), read_run(b), "loss", TOLERANCE)
    assert found is not None
    assert found.step == 2
    assert "precision plan: the same for all 5 layers" in diff(a, b)


def test_keys_with_defaults_versions_data_and_layers(make_run: MakeRun) -> None:
    launch = {"num_steps": 100, "num_ranks": 1, "device": "cpu", "versions": {"torch": "2.13.0"}}
    a = make_run(
        "a", [row(1)], precision_plan__json=plan(3),
        run__json={"recipe": "full_finetune", "data_digest": "aaaa", "launches": [launch]},
    )  # fmt: skip
    b = make_run(
        "b", [row(1)], precision_plan__json=plan(3, grad_weight="high"),
        run__json={"recipe": "full_finetune", "data_digest": "bbbb",
                   "launches": [launch | {"versions": {"torch": "2.11.0"}}]},
    )  # fmt: skip
    config = b / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.003", "lr: 0.001, beta1: 0.9").replace("runs/x", "y"))
    text = diff(a, b)
    assert "config: 2 of 8 keys differ" in text  # without output_dir
    assert [line.split() for line in text.splitlines() if "optimizer" in line] == [
        ["optimizer.lr", "0.003", "0.001"],
        ["optimizer.beta1", "—", "0.9"],
    ]
    assert "made with: versions, data (digest) differ" in text
    assert "torch 2.11.0" in text
    assert "bbbb" in text
    assert "the same: recipe full_finetune, device cpu, ranks 1" in text
    assert "precision plan: 6 of 7 layers differ" in text
    assert "grad_weight int8 column -> high" in text
    assert "model.layers.0-2.mlp.up_proj" in text
    assert "lm_head" not in text


def test_versions_come_from_a_checkpoint_where_run_json_is_missing(make_run: MakeRun) -> None:
    folder = make_run("a", [row(1)])
    for step, version in ((10, "1.0"), (20, "2.0")):
        checkpoint = folder / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        state = {"about": {"lptune": version, "torch": "2.13.0"}, "fingerprint": {"data": "c24c"}}
        (checkpoint / "state.json").write_text(json.dumps(state))
    (folder / "checkpoints" / "step-00000030").mkdir()  # without a state: damaged
    facts = read_run(folder).facts
    assert facts.versions == "lptune 2.0, torch 2.13.0"
    assert facts.data_digest == "c24c"


def test_a_number_and_the_same_number_of_another_type_are_one_setting() -> None:
    assert differing_keys([{"a": 1}, {"a": 1.0}]) == {}
    assert differing_keys([{"a": 1}, {"a": True}]) == {"a": ["1", "true"]}
    assert differing_keys([{"a": None}, {}]) == {"a": ["null", "—"]}
    assert differing_keys([{"a": [1, 2]}, {"a": [1, 3]}]) == {"a": ["[1, 2]", "[1, 3]"]}
    assert differing_keys([{"output_dir": "x"}, {"output_dir": "y"}]) == {}


def test_names_are_as_short_as_tells_them_apart() -> None:
    assert labels([Path("/r/x/a"), Path("/r/y/a"), Path("/r/x/b")]) == ["x/a", "y/a", "b"]
    assert labels([Path("/r/a")]) == ["a"]
