"""Configs: what a YAML and key=value arguments become, and the one line that each mistake gets."""

# ruff: noqa: E501  (messages are compared whole)

import dataclasses
import typing
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lptune.base.errors import UserError
from lptune.config import (
    EvaluateConfig,
    FinetuneConfig,
    GenerateConfig,
    key_paths,
    load_config,
    to_yaml,
)
from lptune.config.elsewhere import KEYS, SWITCHES, VALUES
from lptune.config.load import changed_yaml

BASE = "model: {path: a}\ndata: {source: builtin}\n"


def load(tmp_path: Path, text: str | bytes, *overrides: str) -> FinetuneConfig:
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(FinetuneConfig, path, overrides)


def refused(tmp_path: Path, text: str | bytes, *overrides: str) -> str:
    """The one line, with the file's path shortened to its name."""
    with pytest.raises(UserError) as caught:
        load(tmp_path, text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{tmp_path}/", "")


def test_yaml_overrides_defaults_and_arguments_override_yaml(tmp_path: Path) -> None:
    cfg = load(tmp_path, BASE + "seed: 1\noptimizer: {lr: 1e-4}\n", "seed=2", "seed=3")
    assert (cfg.seed, cfg.optimizer.lr, cfg.optimizer.beta1) == (3, 1e-4, 0.9)


# fmt: off
MISTAKES: list[tuple[str | bytes, str]] = [
    ("", "model: is required; set it in the file or as an argument model.path=…"),
    ("model: {path: a}\ndata: {seq_len: 8}", "data.source: is required; set it in the file or as an argument"),
    (BASE + "model: {path: b}", "line 3: not valid YAML: found duplicate key model"),
    ("x: !!python/object/apply:os.system [ls]", "line 1: not valid YAML: could not determine a constructor"),
    ("a: &a [*a]", "line 1: not valid YAML: YAML recursive aliases are not supported."),
    (b"\xff\xfe\x00", "is not UTF-8 text; a config is a YAML file, saved as UTF-8"),
    (BASE + "optimizer: {weight_deca: 1}", "unknown key 'optimizer.weight_deca' (did you mean 'optimizer.weight_decay'?)"),
    (BASE + "lr: 1", "unknown key 'lr' (did you mean 'optimizer.lr'?)"),
    (BASE + "data.seq_len: 8", "unknown key 'data.seq_len'; write it nested, data: {seq_len: …}"),
    (BASE + "optimizer: [1]", "optimizer: is a section of keys, found [1]; set one of them, optimizer.kind=…"),
    (BASE + "optimizer: {lr: }", "optimizer.lr: must be a number, found nothing"),
    (BASE + "optimizer: {lr: true}", "optimizer.lr: must be a number, found True"),
    (BASE + "optimizer: {lr: .inf}", "optimizer.lr: must be greater than 0 and finite, found inf"),
    (BASE + "seed: [1]", "seed: must be an integer, found [1]"),
    (BASE + "output_dir: false", "output_dir: must be text, found False"),
    (BASE + "precision: {verify: 1}", "precision.verify: must be true or false, found 1"),
    (BASE + "precision: {skip: [1]}", "precision.skip: must be a list of names, found [1]"),
    (BASE + "precision: {skip: [*.o_proj]}", "line 3: not valid YAML | put text that starts with * or & in quotes"),
    (BASE + "output_dir: ${nope}", "output_dir: Interpolation key 'nope' not found"),
]
ARGUMENTS = [
    ("optimizer.lr=fast", "optimizer.lr: must be a number, found 'fast'"),
    ("optimizer.lr=null", "optimizer.lr: must be a number, found nothing"),
    ("optimizer.lr=[1", "not valid YAML: did not find expected ',' or ']'"),
    ("a..b=1", "overrides have the form key=value, e.g. optimizer.lr=1e-5"),
    ("optimizer.lrr=1", "unknown key 'optimizer.lrr' (did you mean 'optimizer.lr'?)"),
    ("data={source: a, seq_len: b}", "data.seq_len: must be an integer, found 'b'"),
    ("micro_batch_size=3", "global_batch_size: 32 is not a multiple of micro_batch_size (3)"),
    ("seed.x=1", "seed: must be an integer, found {'x': 1}"),
    ("model.path=", "model.path: is empty; name a file or folder"),
    # A word of another trainer gets what it is here, and no lookalike.
    ("precision.kind=fp8", "here that is float8_tensorwise or float8_rowwise"),
    ("precision.kind=fp4", "here that is nvfp4"),
    ("precision.kind=int4", "did you mean 'int4_weight'?"),
    ("device=gpu", "here that is cuda"),
    ("learning_rate=1", "here that is optimizer.lr"),
    ("gradient_accumulation_steps=2", "global_batch_size and ranks decide it"),
    ("model._component_=x", "a config names no code"),
    ("tokenizer.max_seq_len=8", "data.seq_len"),
]
# fmt: on


@pytest.mark.parametrize(
    ("text", "argument", "message"),
    [
        *((text, "max_grad_norm=2", f"c.yaml: | {message}") for text, message in MISTAKES),
        *((BASE, argument, f"argument {argument!r}: | {message}") for argument, message in ARGUMENTS),
    ],
)
def test_a_mistake_is_one_line_with_its_place(
    tmp_path: Path, text: str | bytes, argument: str, message: str
) -> None:
    found = refused(tmp_path, text, argument)
    assert [words for words in message.split(" | ") if words not in found] == [], found
    if "here that is" in message or not text:
        assert "did you mean" not in found


def test_text_arguments_are_taken_as_they_stand(tmp_path: Path) -> None:
    template = "{% for m in messages %}Q: {{ m['content'] }} = #1\n{% endfor %}"
    cfg = load(tmp_path, BASE, f"data.chat_template={template}", "data.prompt_template=Q: {question}\nA: ")
    assert cfg.data.chat_template == template
    assert cfg.data.prompt_template == "Q: {question}\nA: "
    assert load(tmp_path, BASE, "data.text_column=null").data.text_column is None


def test_lists_come_as_yaml_or_separated_by_commas(tmp_path: Path) -> None:
    wanted = ("lm_head", "model.layers.0.*")
    assert load(tmp_path, BASE, "precision.skip=[lm_head, model.layers.0.*]").precision.skip == wanted
    assert load(tmp_path, BASE, "precision.skip=lm_head,model.layers.0.*").precision.skip == wanted
    # Globs that begin with a star are no YAML.
    assert load(tmp_path, BASE, "precision.skip=[*.o_proj, 'lm_head']").precision.skip == (
        "*.o_proj",
        "lm_head",
    )
    assert load(tmp_path, BASE, "precision.skip=*_proj").precision.skip == ("*_proj",)
    assert load(tmp_path, BASE, "precision.skip=").precision.skip == ()
    with pytest.raises(UserError, match=r"precision\.skip is a list; \[\] is the empty one"):
        load(tmp_path, BASE, "precision.skip=null")


STOPS = (
    ("[' little']", (" little",)), ('["mom, dad", b]', ("mom, dad", "b")), ('["\\n"]', ("\n",)),
    ("[' ']", (" ",)), ("a, b", ("a, b",)), ("' b'", (" b",)), ("[]", ()), ("[1, x]", ("1", "x")),
)  # fmt: skip


@pytest.mark.parametrize(("written", "texts"), STOPS)
def test_stop_texts_are_those_of_yaml(tmp_path: Path, written: str, texts: tuple[str, ...]) -> None:
    path = tmp_path / "c.yaml"
    for cls, section in ((GenerateConfig, "sampling"), (EvaluateConfig, "answers")):
        path.write_text("model: {path: a}\n")
        cfg = load_config(cls, path, [f"{section}.stop={written}"])
        path.write_text(f"model: {{path: a}}\n{section}:\n  stop: {written}\n")
        assert getattr(cfg, section).stop == texts
        assert load_config(cls, path) == cfg
        path.write_text(to_yaml(cfg))
        assert load_config(cls, path) == cfg
        with pytest.raises(UserError, match=rf"{section}\.stop: has an empty text"):
            load_config(cls, path, [f"{section}.stop=['']"])


@pytest.mark.parametrize(
    ("text", "arguments", "output_dir"),
    [
        ("", (), "r-none"),
        ("precision:\n", (), "r-none"),  # an empty section: its defaults
        ("precision: {kind: mxfp8}\n", (), "r-mxfp8"),
        ("precision: {kind: mxfp8}\n", ("precision.kind=int8_rowcol",), "r-int8_rowcol"),
        ("", ("precision.kind=none", "output_dir=s-${precision.kind}-${seed}"), "s-none-0"),
        ("precision: {verify: false}\n", ("output_dir=s-${precision.verify}",), "s-False"),
    ],
)
def test_a_reference_to_a_key_that_is_not_set_means_its_default(
    tmp_path: Path, text: str, arguments: tuple[str, ...], output_dir: str
) -> None:
    cfg = load(tmp_path, BASE + "output_dir: r-${precision.kind}\n" + text, *arguments)
    assert cfg.output_dir == output_dir
    assert load(tmp_path, to_yaml(cfg)) == cfg


@pytest.mark.parametrize("written", ["false", "False", "true"])
@pytest.mark.parametrize("key", ["compile", "resume"])
def test_true_and_false_switch_a_choice_on_and_off(tmp_path: Path, key: str, written: str) -> None:
    meant = {"compile": ("none", "block"), "resume": ("none", "auto")}[key][written == "true"]
    assert getattr(load(tmp_path, BASE, f"{key}={written}"), key) == meant
    assert getattr(load(tmp_path, BASE + f"{key}: {written}\n"), key) == meant


def test_what_other_trainers_words_are_here_exists_here(tmp_path: Path) -> None:
    keys = set(key_paths(FinetuneConfig))
    sections = {key.partition(".")[0] for key in keys}
    assert not keys & set(KEYS)
    for meant in KEYS.values():
        first = meant.split()[0].rstrip(",")
        assert first in keys | sections or meant.startswith(("there is none", "a flag: lptune run --n")), (
            meant
        )
    for key, values in [*VALUES.items(), *SWITCHES.items()]:
        for meant in filter(None, values.values()):
            load(tmp_path, BASE, f"{key}={meant.split()[0].rstrip(',;')}")


@pytest.mark.parametrize(
    "text",
    [
        "output_dir: 'r-${precision.kind}-${seed}'",
        "output_dir: 'r-${ data.source }'",
        "data: {prompt_template: 'costs \\${5 or so}'}",
    ],
)
def test_what_a_config_may_interpolate(text: str, tmp_path: Path) -> None:
    load(tmp_path, OmegaConf.to_yaml(OmegaConf.merge(OmegaConf.create(BASE), OmegaConf.create(text))))


def leaves(cls: type, prefix: str = "") -> dict[str, typing.Any]:
    found: dict[str, typing.Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            found |= leaves(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            found[prefix + name] = hint
    return found


def a_value(key: str, hint: typing.Any) -> st.SearchStrategy[typing.Any]:
    text = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8).filter(
        lambda t: "${" not in t and t != "???" and "\\" not in t
    )
    if hint is float:
        return st.floats(1e-9, 0.999)
    if hint is int:
        return st.integers(4, 2**40).map(lambda n: n * 4 if key.endswith("global_batch_size") else n)
    if hint is bool:
        return st.booleans()
    if typing.get_origin(hint) is tuple:
        return st.lists(text.map(str.strip).filter(bool), max_size=3).map(tuple)
    return st.none() | text if type(None) in typing.get_args(hint) and str in typing.get_args(hint) else text


FREE = {
    key: hint
    for key, hint in leaves(FinetuneConfig).items()
    if key in ("output_dir", "resume", "seed", "precision.skip", "precision.verify", "optimizer.lr", "optimizer.beta1")
    or key.endswith(("_column", "_template", "path", "data.source", "_steps", "_project", "data.split"))
    if hint != (int | None) and key != "schedule.decay_steps"  # which belongs to one kind of schedule
}  # fmt: skip


class QuotedText(yaml.SafeDumper):
    """Text is text, however it looks."""


QuotedText.add_representer(str, lambda d, text: d.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


@pytest.mark.parametrize("text", ["0E0", "1e5", "-3", "+1", ".5", "1_000", "0x1F", "007", "1.5.2", "12:30"])
def test_text_that_looks_like_a_number_stays_text_in_a_written_config(tmp_path: Path, text: str) -> None:
    cfg = load(tmp_path, f"model: {{path: '{text}'}}\ndata: {{source: builtin}}\n")
    assert cfg.model.path == text
    assert load(tmp_path, to_yaml(cfg)) == cfg


@given(st.fixed_dictionaries({}, optional={key: a_value(key, hint) for key, hint in FREE.items()}))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_to_yaml_and_load_config_are_inverse(tmp_path: Path, chosen: dict[str, typing.Any]) -> None:
    assume(chosen.get("resume", "").lower() not in ("true", "false"))  # words for auto and none
    # What is an error is no config: a home of nobody.
    assume(not any(isinstance(value, str) and value.startswith("~") for value in chosen.values()))
    nested: dict[str, typing.Any] = {"model": {"path": "a"}, "data": {"source": "builtin"}}
    for key, value in chosen.items():
        *sections, leaf = key.split(".")
        section = nested
        for name in sections:
            section = section.setdefault(name, {})
        section[leaf] = list(value) if isinstance(value, tuple) else value
    cfg = load(tmp_path, yaml.dump(nested, Dumper=QuotedText, allow_unicode=True))
    for key, value in chosen.items():
        found: typing.Any = cfg
        for name in key.split("."):
            found = getattr(found, name)
        assert found == value, key
    assert load(tmp_path, to_yaml(cfg)) == cfg


@given(
    st.text(max_size=60) | st.lists(st.sampled_from(["model", "data", ":", " ", "\n", "{", "}", "a", "- ", "&x", "*x", "!!", "null", "seed", "?", "'", "${", "}"]), max_size=25).map("".join),
    st.lists(st.sampled_from(key_paths(FinetuneConfig)).flatmap(lambda k: st.text(max_size=12).map(lambda v: f"{k}={v}")) | st.text(max_size=10), max_size=2),
)  # fmt: skip
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_input_gets_past_the_one_line_error(tmp_path: Path, text: str, arguments: list[str]) -> None:
    try:
        load(tmp_path, text.encode("utf-8", "surrogatepass"), *arguments)
        message = ""
    except UserError as error:
        message = str(error)
    assert "\n" not in message


CHANGED = """\
# A comment.
model: {path: here}
data: {source: rows.jsonl, seq_len: 2048}
precision: {kind: float8_rowwise}
optimizer: {lr: 1.0e-5}
output_dir: runs/x-${precision.kind}
"""


def test_a_changed_config_has_what_differs_and_loads_as_the_changed_config(tmp_path: Path) -> None:
    given = tmp_path / "given.yaml"
    given.write_text(CHANGED, encoding="utf-8")
    overrides = ["micro_batch_size=2", "seed=0"]
    changes = {"precision.kind": "int8_rowcol", "precision.skip": ("lm_head", "k_proj")}
    text = changed_yaml(FinetuneConfig, given, overrides, changes)
    assert text == (
        "model: {path: here}\n"
        "data: {source: rows.jsonl}\n"  # 2048 is the default
        "precision: {kind: int8_rowcol, skip: [lm_head, k_proj]}\n"
        "optimizer: {lr: 1.0e-05}\n"
        "output_dir: runs/x-${precision.kind}\n"
        "micro_batch_size: 2\n"  # seed=0 is the default
    )
    (tmp_path / "new.yaml").write_text(text, encoding="utf-8")
    new = load_config(FinetuneConfig, tmp_path / "new.yaml")
    arguments = [*overrides, "precision.kind=int8_rowcol", "precision.skip=[lm_head,k_proj]"]
    assert new == load_config(FinetuneConfig, given, arguments)
    assert new.output_dir == "runs/x-int8_rowcol"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("output_dir", "output_dir: 'r-${oc.env:NOT_SET,${seed}}'"),
        ("output_dir", "output_dir: r-${oc.${data.prompt_column}:LPTUNE_TEST_SECRET}"),
        ("output_dir", "output_dir: r-${${data.prompt_column}:LPTUNE_TEST_SECRET}"),
        ("output_dir", "data: {text_column: '\\${oc.', split: 'env:LPTUNE_TEST_SECRET}'}\noutput_dir: '${oc.decode:${data.text_column}${data.split}}'"),
        ("data.system_prompt", "data: {system_prompt: '${oc.env:LPTUNE_TEST_SECRET}'}"),
        ("data.source.system_prompt", "data: {source: [{source: a.jsonl, system_prompt: '${oc.env:LPTUNE_TEST_SECRET}'}]}"),
        ("data.system_prompt", "output_dir: '${oc.env:LPTUNE_TEST_SECRET}'\ndata: {system_prompt: '${output_dir}'}"),
        ("checkpoint", "model: {path: '${oc.env:LPTUNE_TEST_SECRET}'}\ncheckpoint: '${model}'"),
    ],
)  # fmt: skip
def test_what_is_kept_reads_no_variable_of_the_environment(
    key: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's config would put a token into what is trained, exported or logged."""
    monkeypatch.setenv("LPTUNE_TEST_SECRET", "s3cret")
    written = OmegaConf.to_yaml(OmegaConf.merge(OmegaConf.create(BASE), OmegaConf.create(text)))
    message = refused(tmp_path, written, "data.prompt_column=env")
    assert f"{key}: " in message
    assert "s3cret" not in message


def test_places_may_read_variables_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LPTUNE_TEST_SCRATCH", "/scratch")
    text = "output_dir: '${ oc.env : LPTUNE_TEST_SCRATCH }/run'\ndata: {cache: '${output_dir}/${oc.env:LPTUNE_TEST_SCRATCH}', source: [a.jsonl, {source: '${oc.env:LPTUNE_TEST_SCRATCH}/b.jsonl'}]}"
    written = OmegaConf.to_yaml(OmegaConf.merge(OmegaConf.create(BASE), OmegaConf.create(text)))
    cfg = load(tmp_path, written)
    assert (cfg.output_dir, cfg.data.cache) == ("/scratch/run", "/scratch/run//scratch")
    assert [each.source for each in cfg.data.sources] == ["a.jsonl", "/scratch/b.jsonl"]
    assert "NOT_SET" in refused(tmp_path, f"{written}resume: '${{oc.env:LPTUNE_TEST_NOT_SET}}'\n")
