"""`lptune keys` and `lptune run RECIPE --help`: every key of every recipe, as the dataclasses have it."""

import dataclasses
import re
from pathlib import Path

import pytest

from lptune.base.errors import UserError
from lptune.cli import catalog, recipe
from lptune.config import PRECISION_KINDS, FinetuneConfig, SourceConfig, default, key_paths, load_config
from lptune.config.documented import Key, keys, sections
from tests.cli.conftest import CONFIG, Command

RECIPES = sorted(catalog.recipes())
OWN_CONFIG = '''
from dataclasses import dataclass

from lptune.config import FinetuneConfig


@dataclass(frozen=True, kw_only=True)
class MyConfig(FinetuneConfig):
    """Keys of mine."""

    alpha: float = 1.5
    """The weight of my own term."""
    bare: int = 2


def main(cfg: MyConfig) -> None:
    """Runs."""
'''


def config_class(name: str) -> type:
    return recipe.config_class(catalog.recipes()[name])


def by_name(cls: type) -> dict[str, Key]:
    return {key.name: key for key in keys(cls)}


@pytest.mark.parametrize("name", RECIPES)
def test_every_key_of_every_recipe_has_its_default_and_a_meaning(name: str) -> None:
    cls = config_class(name)
    found = by_name(cls)
    assert set(found) == set(key_paths(cls))
    for key in found.values():
        assert key.text, key.name
        if key.default is not None and key.default not in ("[]", "''"):
            typed = {"true": True, "false": False, "null": None}.get(key.default, key.default)
            plain = default(cls, key.name)
            assert plain == typed or str(plain) == key.default or str(plain) == str([key.default[1:-1]])


def test_the_choices_are_exactly_those_that_the_check_accepts(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    found = by_name(FinetuneConfig)
    assert found["precision.kind"].choices == tuple(PRECISION_KINDS)
    num_choices = 0
    for key in found.values():
        for choice in key.choices:
            message = ""
            try:
                load_config(FinetuneConfig, tmp_path / "c.yaml", [f"{key.name}={choice}"])
            except UserError as error:  # legal, but not with the other keys
                message = str(error)
            assert "is not one of" not in message
            num_choices += 1
        if key.choices:
            with pytest.raises(UserError, match="is not one of"):
                load_config(FinetuneConfig, tmp_path / "c.yaml", [f"{key.name}=nothing"])
    assert num_choices > 40
    # A text key without a check has none, and no number has.
    assert not found["output_dir"].choices
    assert not any(key.choices for key in found.values() if key.type in ("number", "integer"))


@pytest.mark.parametrize("name", RECIPES)
def test_lists_and_helps_fit_the_terminal_and_name_every_key(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (["keys", "--recipe", name], ["run", name, "--help"], ["run", name, "-h"]):
        code, stdout, stderr = command(*arguments)
        assert (code, stderr) == (0, "")
        assert max(map(len, stdout.splitlines())) <= 80
        for key in keys(config_class(name)):
            assert re.search(rf"(?<![\w.]){key.leaf}(:|\*)", stdout), key.name
    assert catalog.summary(catalog.recipes()[name])[:30] in stdout  # the last of them is a help


def test_a_section_has_the_whole_text_and_a_key_its_choices(command: Command) -> None:
    code, stdout, _ = command("keys", "precision")
    words = " ".join(stdout.split())
    assert (code, "Costs time. (true or false)" in words) == (0, True)
    assert not re.search(r"^  seq_len", stdout, re.MULTILINE)
    _, stdout, _ = command("keys", "precision.kind")
    lines = stdout.splitlines()
    assert lines[0] == "precision.kind"
    listed = [line.split()[0] for line in lines if re.match(r"    \w+  ", line)]
    assert listed == list(PRECISION_KINDS)
    assert all(re.match(r"    \w+ +\S", line) for line in lines if re.match(r"    \w", line)), (
        "each has a meaning"
    )


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["clip"], "max_grad_norm"),
        (["gradient", "norm"], "max_grad_norm"),
        (["lr"], "optimizer.lr"),
        (["max_grad_norm"], "max_grad_norm"),
        (["learning_rate"], "learning_rate, a key of other trainers: optimizer.lr"),
        (["kto.beta"], "kto.beta"),
        (["kto"], "kto           How the answers of each label are rewarded."),
        (["prompts.source"], "prompts.source"),
    ],
)
def test_a_key_is_found_by_name_by_another_trainers_name_and_by_a_word(
    command: Command, words: list[str], first: str
) -> None:
    code, stdout, stderr = command("keys", *words)
    assert (code, stderr) == (0, "")
    assert stdout.startswith(first)


def test_keys_that_only_some_recipes_have_say_so(command: Command) -> None:
    assert "  only in  full_kto\n" in command("keys", "kto.beta")[1]
    assert "  only in  continued_pretrain\n" in command("keys", "num_tokens")[1]
    for everywhere in ("optimizer.lr", "data.seq_len", "eval_every_steps", "precision.kind"):
        assert "only in" not in command("keys", everywhere)[1], everywhere


def test_a_copied_recipe_with_keys_of_its_own_has_its_help(command: Command) -> None:
    Path("mine.py").write_text(f'"""My training.\n\n    lptune run mine.py\n"""\n{OWN_CONFIG}')
    code, stdout, _ = command("run", "mine.py", "--help")
    assert code == 0
    assert "My training." in stdout
    assert "alpha: 1.5, bare: 2" in " ".join(stdout.split())
    _, stdout, _ = command("keys", "alpha", "--recipe", "mine.py")
    assert stdout == "alpha\n  The weight of my own term.\n  type     number\n  default  1.5\n"


def test_help_of_run_stays_that_of_the_command_and_a_misspelt_recipe_is_named(command: Command) -> None:
    for arguments in (["run", "--help"], ["run", "--config", "quickstart", "-h"]):
        code, stdout, _ = command(*arguments)
        assert code == 0
        assert "Usage: lptune run [OPTIONS] [torchrun flags] RECIPE" in stdout
    code, stdout, _ = command("run", "--nproc-per-node", "2", "full_dpo", "--help")
    assert "preference.loss" not in stdout
    assert "loss: dpo" in stdout
    code, _, stderr = command("run", "full_fintune", "--help")
    assert (code, stderr) == (2, "error: full_fintune: no such recipe (did you mean 'full_finetune'?)\n")


def test_every_section_and_every_entry_of_a_source_is_explained() -> None:
    for section in sections(FinetuneConfig):
        assert section.text or not section.name
    entry = {key.name for key in by_name(FinetuneConfig)["data.source"].entry}
    assert entry == {field.name for field in dataclasses.fields(SourceConfig)}


def test_a_key_that_another_recipe_has_is_named_with_it_where_the_config_is_that_recipes(
    command: Command,
) -> None:
    for name, config, key in (
        ("generate", "generation", "compile"),
        ("full_dpo", "llama3_2/1b_dpo", "num_tokens"),
        ("full_finetune", "quickstart", "preference.beta"),
    ):
        _, _, stderr = command("validate", name, "--config", config, f"{key}=1")
        assert f"argument '{key}=1': unknown key '{key.partition('.')[0]}'" in stderr
        assert "the recipe" not in stderr
