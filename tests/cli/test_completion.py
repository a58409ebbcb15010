"""Completion by Tab: click's protocol as the scripts of bash, zsh and fish use it, and the scripts."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lptune.config import PRECISION_KINDS, PreferenceConfig, key_paths
from tests.cli.conftest import Command
from tests.helpers import cold, warm


def complete(shell: str, folder: Path, *words: str) -> list[str]:
    """What the command answers to a shell: words are those before the cursor, the last one incomplete."""
    number = str(len(words) - 1) if shell != "fish" else words[-1]
    variables = {"COMP_WORDS": " ".join(words), "COMP_CWORD": number, "_LPTUNE_COMPLETE": f"{shell}_complete"}
    done = warm.lptune([], folder=folder, environment=variables)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines() if done.stdout.strip() else []
    if shell == "zsh":
        return [f"{kind},{value}" for kind, value in zip(lines[0::3], lines[1::3], strict=True)]
    return [line.partition("\t")[0] for line in lines]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_recipes_configs_keys_and_values_are_offered(tmp_path: Path, shell: str) -> None:
    assert "plain,keys" in complete(shell, tmp_path, "lptune", "k")
    assert complete(shell, tmp_path, "lptune", "run", "full_f") == ["plain,full_finetune"]
    configs = complete(shell, tmp_path, "lptune", "run", "full_dpo", "--config", "qwen")
    assert configs == ["plain,qwen2_5/0.5b_dpo", "plain,qwen3/0.6b_dpo"]
    found = complete(
        shell, tmp_path, "lptune", "run", "full_dpo", "--config", "llama3_2/1b_dpo", "preference."
    )
    keys = [key for key in key_paths(PreferenceConfig) if key.startswith("preference.")]
    assert found == [f"plain,{key}=" for key in keys]


def test_bash_gets_the_part_behind_the_equals_sign_at_which_it_splits_words(tmp_path: Path) -> None:
    kinds = [f"plain,{kind}" for kind in PRECISION_KINDS]
    begin = ("lptune", "run", "full_finetune", "precision.kind", "=")
    assert complete("bash", tmp_path, *begin) == kinds
    int8 = [kind for kind in kinds if kind.startswith("plain,int8")]
    assert complete("bash", tmp_path, *begin, "int8") == int8
    # A value that is given: its key is not offered again, and the next word is a new one.
    offered = complete("bash", tmp_path, *begin, "mxfp8", "precision.")
    assert "plain,precision.kind=" not in offered
    assert "plain,precision.skip=" in offered
    assert complete("bash", tmp_path, "lptune", "run", "--config", "=", "quick") == ["plain,quickstart"]
    assert complete("bash", tmp_path, *begin[:3], "data.packing", "=", "t") == ["plain,true"]
    assert complete("bash", tmp_path, *begin[:3], "data.source", "=", "ro") == ["file,ro"]


def test_bash_itself_completes_with_the_script(command: Command, tmp_path: Path) -> None:
    script = command("completion", "bash")[1]
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "lptune"
    program.write_text(f'#!/bin/sh\nexec "{cold.command()[0]}" -m lptune "$@"\n')
    program.chmod(0o755)
    test = f"""{script}
        compopt() {{ echo "compopt" "$@"; }}
        COMP_WORDS=(lptune run full_dpo precision.kind = mx) COMP_CWORD=5
        _lptune_completion lptune; echo "${{COMPREPLY[@]}}"
        COMPREPLY=() COMP_WORDS=(lptune run full_dpo precision.gr) COMP_CWORD=3
        _lptune_completion lptune; echo "${{COMPREPLY[@]}}"
    """
    environment = cold.environment() | {"PATH": f"{program.parent}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", test], capture_output=True, text=True, cwd=tmp_path, env=environment)
    lines = done.stdout.splitlines()
    assert (lines[0], done.stderr) == ("mxfp8", "")
    assert "compopt -o nospace" in lines
    assert lines[-1] == "precision.grad_input= precision.grad_weight= precision.grad_format="


def test_a_completion_imports_no_torch_nor_numpy(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom lptune.cli.main import main\n"
        "try:\n    main([])\nfinally:\n    print('HEAVY', 'torch' in sys.modules, 'numpy' in sys.modules)\n"
    )
    words = {"COMP_WORDS": "lptune run full_dpo preference.loss=", "_LPTUNE_COMPLETE": "zsh_complete"}
    done = cold.run("-c", program, folder=tmp_path, COMP_CWORD="3", **words)
    assert done.stdout.splitlines()[-1] == "HEAVY False False"


def test_names_are_offered_where_they_belong_and_none_where_a_word_before_them_is_wrong(
    tmp_path: Path,
) -> None:
    for words, offered in (
        ("plan --device h1", "plain,h100"),
        ("new-checkpoint llama3_2/t", "plain,llama3_2/tiny"),
        ("download allen", "plain,allenai/OLMo-2-1124-7B"),
        ("keys precision.k", "plain,precision.kind"),
        ("cat quick", "plain,quickstart"),
        ("validate llama3_2/1b_kto kto.", "plain,kto.beta="),  # the recipe of the config decides the keys
    ):
        assert offered in complete("bash", tmp_path, "lptune", *words.split())
    for words in ("validate llama3_2/1b kto.", "run full_dpo --config nothing x.", "run missing.py x."):
        assert complete("bash", tmp_path, "lptune", *words.split()) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_command_prints_a_script_that_the_shell_can_parse(command: Command, shell: str) -> None:
    code, stdout, stderr = command("completion", shell)
    assert (code, stderr) == (0, "")
    assert f"_LPTUNE_COMPLETE={shell}_complete" in stdout
    if shutil.which(shell):  # bash is there; the others where they are installed
        checked = subprocess.run([shell, "-n"], input=stdout, capture_output=True, text=True)
        assert (checked.returncode, checked.stderr) == (0, "")
