"""Every malformed input is one line; short form of tests/faults/malformed.py."""

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.faults.malformed import BASE, CONFIGS, DATA, MODELS, STATES, Inputs
from tests.helpers import warm
from tests.helpers.told import only_told


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


SAMPLE = {
    "config": ["deep list", "python tag", "duplicate key"],
    "data": ["json deep", "parquet ends", "script"],
    "model": ["header of 1 GB", "link out", "device for a config", "template long"],
    "state": ["a space more", "overlap", "tensor of other dtype", "state of another step", "upwards"],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in SAMPLE for name in SAMPLE[kind]])
def test_on_the_command_line_it_is_exit_2_and_nothing_is_written(
    inputs: Inputs, tmp_path: Path, kind: str, name: str
) -> None:
    model, rows, resume, config = inputs.model, tmp_path / "r.jsonl", "auto", tmp_path / "c.yaml"
    rows.write_bytes(inputs.rows)
    config.write_text(BASE)
    if kind == "config":
        text = CONFIGS[name]
        config.write_bytes(text if isinstance(text, bytes) else text.encode())
    elif kind == "data":
        rows = tmp_path / DATA[name][0]
        rows.write_bytes(DATA[name][1])
    elif kind == "model":
        model = inputs.copy_of(inputs.model)
        MODELS[name](model)
    else:
        state = inputs.copy_of(inputs.state)
        STATES[name](state)
        resume = str(state)
    keys = {"model.path": model, "data.source": rows, "resume": resume, "output_dir": tmp_path / "out"}
    keys |= {"data.seq_len": 64, "num_steps": 1, "device": "cpu", "compile": "none"}
    command = [
        "run",
        "full_finetune",
        "--config",
        str(config),
        *(f"{key}={value}" for key, value in keys.items()),
    ]
    done = warm.lptune(command, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    # A config is checked before anything is told; weights and data are read when torch is there.
    assert only_told(done.stdout), done.stdout
    assert not done.stdout or kind != "config"
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "out").exists()
