"""What a config may read of the environment: places, numbers and choices, and no text that is kept."""

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from lptune.base.errors import UserError
from lptune.config import FinetuneConfig, load_config, to_yaml
from tests.config.test_load import BASE, leaves, load

NAME = "LPTUNE_TEST_SECRET"
READ = f"${{oc.env:{NAME}}}"
SECRET = "ghp_s3cr3t/ToKeN42"
SOURCES = ("data.source", "data.eval_source")
PLACES = {
    "model.path", "data.cache", "resume", "output_dir",
    *(f"{key}{item}" for key in SOURCES for item in ("", "[0]", "[0].source")),
}  # fmt: skip
"""What a value of the environment may be the text of."""


def texts() -> Iterator[tuple[str, typing.Any]]:
    """(key, a config in which a text X stands there) for each place of the schema where a text can stand:
    every key, every item of a list, every key of such an item.
    """
    for key, hint in leaves(FinetuneConfig).items():
        yield key, nested(key, "X")
        for option in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
            if typing.get_origin(option) is not tuple:
                assert option in (str, int, float, bool, types.NoneType), f"{key}: go over {option} here"
                continue
            yield f"{key}[0]", nested(key, ["X"])
            item = typing.get_args(option)[0]
            for cls in filter(dataclasses.is_dataclass, [item, *typing.get_args(item)]):
                for name in typing.get_type_hints(cls):
                    yield f"{key}[0].{name}", nested(key, [{"source": "builtin", name: "X"}])


def nested(key: str, value: typing.Any) -> dict[str, typing.Any]:
    section, _, leaf = key.rpartition(".")
    return {section: {leaf: value}} if section else {leaf: value}


TEXTS = dict(texts())


def is_number(key: str) -> bool:
    hint = leaves(FinetuneConfig).get(key, str)
    return bool({hint, *typing.get_args(hint)} & {int, float, bool}) or key.endswith("].weight")


def outcome(*arguments: typing.Any) -> FinetuneConfig | str:
    """What `load_around` gives, or the line of its error."""
    try:
        return load_around(*arguments)
    except UserError as error:
        return str(error)


def load_around(folder: Path, key: str, text: str, more: typing.Any = None) -> FinetuneConfig:
    """The config in which `text` stands at `key`, beside the sections `more`."""
    values: typing.Any = {"model": {"path": "m"}, "data": {"source": "builtin"}}
    if key == "data.eval_split":
        values["data"]["eval_source"] = "builtin"
    around = json.loads(json.dumps(TEXTS[key]).replace('"X"', json.dumps(text)))
    for part in (more or {}, around):
        for name, value in part.items():
            values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    path = folder / "c.yaml"
    path.write_text(json.dumps(values))  # which is YAML
    return load_config(FinetuneConfig, path)


def test_the_texts_of_the_schema_are_all_gone_over() -> None:
    assert len(TEXTS) > 100
    assert {"precision.skip", "precision.skip[0]", "data.source[0].system_prompt", *PLACES} <= TEXTS.keys()


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (READ, {}),
        (f"[q{READ}]*", {}),
        ("[q${resume}]*", {"resume": READ}),
        ("${data.eval_source[0].source}", {"data": {"eval_source": [{"source": READ}]}}),
    ],
)
def test_only_a_place_is_a_text_of_the_environment_and_no_error_has_its_value(
    text: str, more: dict[str, typing.Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, SECRET)
    taken = set()
    # How the text comes to a key does not depend on the key: through another one it comes to every fourth.
    keys = set(TEXTS) if not more else {*sorted(TEXTS)[::4], *PLACES}
    through = {key for key in TEXTS if f"${{{key.partition('[')[0]}" in f"{text}{more}"}
    for key in keys - through:
        found = outcome(tmp_path, key, text, more)
        if isinstance(found, str):
            assert SECRET[:6] not in found, key
            assert key.replace("[0]", "") in found.replace("[0]", ""), key
        else:
            taken.add(key)
            assert SECRET in str(found), key
            assert SECRET not in to_yaml(found), key
    assert taken == PLACES - through


def test_a_number_and_a_choice_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, "2")
    numbers = [key for key in TEXTS if is_number(key) and leaves(FinetuneConfig).get(key) is not bool]
    assert {"optimizer.lr", "seed", "data.source[0].weight", "num_steps"} <= set(numbers)
    for key in numbers:
        # Some are out of range, or need another key.
        assert "reads the environment" not in str(outcome(tmp_path, key, READ)), key
    for key, choice in {
        "precision.kind": "int8_rowcol", "device": "cpu", "export.dtype": "float32", "data.format": "text",
        "data.source[0].format": "chat", "schedule.kind": "linear", "data.packing": "false",
    }.items():  # fmt: skip
        monkeypatch.setenv(NAME, choice)
        load_around(tmp_path, key, READ)


def test_short_values_garble_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "a")
    with pytest.raises(UserError, match=r"data\.text_column: Interpolation key 'no\.key' not found"):
        load(tmp_path, BASE, f"output_dir={READ}", "data.text_column=${no.key}")


def test_a_key_beside_one_that_reads_the_environment_may_refer_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, SECRET)
    text = BASE + f"output_dir: 'r-{READ}'\nlogging: {{wandb_project: 'ft-${{precision.kind}}'}}\n"
    cfg = load(tmp_path, text)
    assert (cfg.output_dir, cfg.logging.wandb_project) == (f"r-{SECRET}", "ft-none")
    cfg = load(tmp_path, BASE, f"data.source=[a,'{READ}']", "data.eval_source=${data.source}")
    assert cfg.data.eval_source == ("a", SECRET)
