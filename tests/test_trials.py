"""LPTUNE_TRY: what waits for a measurement can be asked for by name, and by no other name."""

import pytest
import torch

from lptune import distributed
from lptune.base.errors import UserError
from lptune.hardware.trials import TRIALS, check_trials, constant_result, tries


def test_nothing_is_tried_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LPTUNE_TRY", raising=False)
    assert not any(map(tries, TRIALS))


def test_names_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPTUNE_TRY", "cudnn_attention, fa3_attention,")
    assert {name for name in TRIALS if tries(name)} == {"cudnn_attention", "fa3_attention"}


@pytest.mark.parametrize(
    ("value", "said"), [("cudnn", "did you mean 'cudnn_attention'"), ("x", "there are cublas")]
)
def test_an_unknown_name_is_one_line_before_anything_runs(
    value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LPTUNE_TRY", value)
    with pytest.raises(UserError, match=f"LPTUNE_TRY: unknown name '{value}'.*{said}"):
        check_trials()
    with pytest.raises(UserError, match="LPTUNE_TRY"), distributed.session("cpu"):
        pass


def test_compiled_code_takes_the_answer_as_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPTUNE_TRY", "cudnn_attention")

    def run(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if tries("cudnn_attention") and not tries("fa3_attention") else x - 1

    assert torch.compile(run, fullgraph=True)(torch.zeros(2)).tolist() == [1, 1]


def test_the_mark_is_the_one_of_torch() -> None:
    theirs, ours = torch.compiler.assume_constant_result(lambda: 0), constant_result(lambda: 0)
    assert vars(ours) == vars(theirs)
