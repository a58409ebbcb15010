"""Every malformed input is one line; short form of tests/faults/malformed.py."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.faults.malformed import CONFIGS, DATA, MODELS, STATES, Inputs
from tests.helpers import warm


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    root = tmp_path_factory.mktemp("malformed")
    done = warm.lptune(["new-checkpoint", "llama3_2/tiny", "model"], folder=root)
    assert done.returncode == 0, done.stderr
    return Inputs(root, root / "model")


def test_what_the_cases_damage_is_valid(inputs: Inputs) -> None:
    assert not inputs.refuses_config(inputs.config)
    assert not inputs.refuses_data("r.jsonl", inputs.rows)
    assert not inputs.refuses_model(lambda folder: None)
    assert not inputs.refuses_state(lambda folder: None)
    assert not inputs.refuses_state(lambda folder: None, inputs.stack)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_malformed_config_is_one_line(inputs: Inputs, name: str) -> None:
    assert inputs.refuses_config(CONFIGS[name])


@pytest.mark.parametrize("name", DATA)
def test_a_malformed_data_file_is_one_line(inputs: Inputs, name: str) -> None:
    assert inputs.refuses_data(*DATA[name])


@pytest.mark.parametrize("name", MODELS)
def test_a_malformed_model_folder_is_one_line(inputs: Inputs, name: str) -> None:
    assert inputs.refuses_model(MODELS[name])


@pytest.mark.parametrize("name", STATES)
def test_a_malformed_training_checkpoint_is_one_line(inputs: Inputs, name: str) -> None:
    assert inputs.refuses_state(STATES[name])


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(choose=st.randoms(use_true_random=False))
def test_mutations_are_valid_or_one_line_and_no_changed_checkpoint_is_taken(
    inputs: Inputs, choose: random.Random
) -> None:
    inputs.mutate(choose)
