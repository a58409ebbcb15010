"""ls, cp and names: what is found by a name, what a misspelt one gets; sizes, memory and hub ids of the configs."""

import ast
import errno
import os
import time
from pathlib import Path

import pytest

from lptune.base.errors import UserError
from lptune.cli import catalog
from lptune.cli.ls import bytes_of, count_text, ls, needs, num_weights, row
from tests.base.test_progress import terminal
from tests.cli.conftest import CONFIG, Command, write_model

# ruff: noqa: E501  (messages are compared whole)


def test_a_recipe_and_a_config_of_one_name_both_run_and_neither_is_taken_for_the_other(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from lptune.config import FinetuneConfig\n\ndef main(cfg: FinetuneConfig) -> None:\n    print(cfg.seed)\n"
    for folder, file, content in (
        ("recipes", "twin.py", text),
        ("configs", "twin.yaml", CONFIG + "seed: 7\n"),
    ):
        Path(folder).mkdir()
        (Path(folder) / file).write_text(content)
    monkeypatch.setattr(catalog, "folder", Path)
    monkeypatch.setattr("lptune.cli.preflight.check", lambda *_: None)
    missing = "error: run: twin is a config: lptune run twin --config twin\n"
    assert command("run", "twin") == (2, "", missing)
    code, stdout, stderr = command("run", "twin", "--config", "twin")
    assert (code, stderr) == (0, "")
    assert stdout.startswith("recipe     twin, config twin\n")
    assert stdout.endswith("\n7\n")
    for arguments in (["cat", "twin"], ["cp", "twin", "mine.py"]):
        both = "error: twin: is a recipe and a config; give the path: recipes/twin.py or configs/twin.yaml\n"
        assert command(*arguments) == (2, "", both)


def test_a_config_is_checked_against_the_recipe_that_its_comment_names(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from lptune import config\n\ndef main(cfg: config.{0}) -> None:\n    print(cfg.seed)\n"
    Path("recipes").mkdir()
    Path("recipes/full_finetune.py").write_text(text.format("RunConfig"))
    Path("recipes/other.py").write_text(text.format("FinetuneConfig"))
    monkeypatch.setattr(catalog, "folder", Path)
    comment = "#   lptune run --nproc-per-node 2 other --config c.yaml\n"
    keys = CONFIG + "eval_every_steps: 2\n"
    Path("c.yaml").write_text(comment + keys)
    Path("bare.yaml").write_text(keys)
    Path("foreign.yaml").write_text(comment.replace("other", "elsewhere") + keys)
    code, stdout, _ = command("validate", "c.yaml")
    assert (code, stdout.splitlines()[0]) == (0, "ok: c.yaml fits other (FinetuneConfig)")
    # A dry run needs a model: it is the recipe's config that is past.
    assert "unknown key" not in command("plan", "--config", "c.yaml")[2]
    first = "error: run: c.yaml is a config, and RECIPE comes first: lptune run other --config c.yaml\n"
    assert command("run", "c.yaml") == (2, "", first)
    for name in ("bare.yaml", "foreign.yaml"):
        error = (
            f"error: {name}: full_finetune has no key 'eval_every_steps', and the recipe other has it; name the "
            f"recipe: other --config {name}\n"
        )
        for arguments in (
            ["validate", name],
            ["plan", "--config", name],
            ["run", "full_finetune", "--config", name],
        ):
            assert command(*arguments) == (2, "", error), arguments
        assert command("validate", "other", "--config", name)[0] == 0


def test_validate_says_ok_and_notes_what_is_not_here_yet(command: Command) -> None:
    Path("c.yaml").write_text(CONFIG)
    write_model(Path("here"))
    assert command("validate", "c.yaml") == (
        0,
        "ok: c.yaml fits full_finetune (FinetuneConfig)\nnote: model.path: a does not exist here yet\n",
        "",
    )
    _, stdout, _ = command(
        "validate", "c.yaml", "model.path=here", "data.source=rows.jsonl", "data.eval_source=owner/set"
    )
    assert stdout.splitlines()[1:] == ["note: data.source: rows.jsonl does not exist here yet"]
    assert command("validate", "c.yaml", "seed=x")[0] == 2
    # Of a folder all files would be read, those that are trained on among them.
    Path("rows").mkdir()
    Path("rows/train.jsonl").write_text("{}")
    code, _, stderr = command("validate", "c.yaml", "data.eval_source=rows", "data.eval_split=test")
    assert (code, stderr.count("\n")) == (2, 1)
    assert stderr.startswith("error: data.eval_source: rows is on this machine, and only ")


def test_without_a_command_the_help_is_shown(command: Command) -> None:
    code, stdout, _ = command()
    assert code == 0
    assert stdout == command("--help")[1]
    assert "new-checkpoint" in stdout


def test_cp_takes_recipes_and_configs_home(command: Command) -> None:
    assert command("cp", "full_finetune", "mine.py") == (0, "copied full_finetune to mine.py\n", "")
    assert Path("mine.py").read_text() == catalog.recipes()["full_finetune"].read_text()
    assert command("cp", "llama3_2/1b", ".")[0] == 0
    assert Path("1b.yaml").read_text() == catalog.configs()["llama3_2/1b"].read_text()
    assert command("cp", "llama3_2/1b", "a/b/c.yaml", "--parents")[0] == 0
    assert command("validate", "mine.py", "--config", "a/b/c.yaml", "data.source=x.jsonl")[0] == 0
    assert command("cp", "--make-parents", "llama3_2/1b", "d/e/c.yaml")[0] == 0  # as torchtune writes it


def test_cp_overwrites_a_file_if_forced_and_never_one_that_it_links_to(command: Command) -> None:
    Path("mine.py").write_text("mine")
    assert command("cp", "full_finetune", "mine.py")[0] == 2
    assert Path("mine.py").read_text() == "mine"
    assert command("cp", "full_finetune", "mine.py", "--force")[0] == 0
    Path("precious").write_text("precious")
    os.link("precious", "second_name.py")
    Path("to_precious.py").symlink_to("precious")
    Path("to_nothing.py").symlink_to("nothing.py")
    for name in ("mine.py", "second_name.py", "to_precious.py", "to_nothing.py"):
        assert command("cp", "full_finetune", name, "--force")[0] == 0
        assert Path(name).read_text() == catalog.recipes()["full_finetune"].read_text()
    assert Path("precious").read_text() == "precious"
    assert not Path("nothing.py").exists()
    assert not list(Path().glob(".tmp*"))
    own = str(catalog.recipes()["full_finetune"])
    assert command("cp", "full_finetune", own, "--force")[0] == 2
    assert Path(own).stat().st_size


def blocks(stdout: str) -> dict[str, list[str]]:
    """First line of a recipe -> the lines of its configs, without the note at the end."""
    found, first = dict[str, list[str]](), ""
    for line in stdout.partition("\n\n")[0].splitlines():
        if line.startswith(" "):
            found[first].append(line)
        else:
            first = line
            found[first] = []
    return found


def test_each_config_stands_under_its_recipe_with_size_memory_and_hub_id(command: Command) -> None:
    code, stdout, stderr = command("ls")
    assert (code, stderr) == (0, "")
    found = blocks(stdout)
    assert list(found) == [
        f"{name}  {(ast.get_docstring(ast.parse(path.read_text())) or '').splitlines()[0]}"
        for name, path in catalog.recipes().items()
    ]
    listed = {line.split()[0]: (first.split()[0], line) for first, lines in found.items() for line in lines}
    assert sorted(listed) == sorted(catalog.configs())
    for name, (of, line) in listed.items():
        path = catalog.configs()[name]
        text = path.read_text()
        assert of == catalog.recipe_of(path)
        if "/" in name:  # the first comment and the list agree
            memory = next(cell for cell in line.split("  ") if cell.endswith(" GB"))
            assert f"take {memory.strip()} over all" in " ".join(text.replace("#", " ").split())
            hub_id = line.split()[-1]
            assert f"lptune download {hub_id}" in text
            assert (
                hub_id.rpartition("/")[2] in text.partition("model: {path: checkpoints/")[2].splitlines()[0]
            )
        else:
            comment = line.split(maxsplit=1)[1]
            begins = " ".join(part.lstrip("# ") for part in text.splitlines()[:3])
            assert begins.startswith(comment.removesuffix(" …"))


def test_every_config_of_a_model_has_a_preset() -> None:
    # Without one its line would have no sizes, silently.
    assert [name for name in catalog.configs() if num_weights(name) is None] == [
        "evaluation",
        "generation",
        "quickstart",
    ]
    assert all(row(name, path).hub_id for name, path in catalog.configs().items() if "/" in name)


def test_words_choose_a_recipe_or_configs(command: Command) -> None:
    found = blocks(command("ls", "full_dpo")[1])
    assert [first.split()[0] for first in found] == ["full_dpo"]
    of_recipe = [name for name, path in catalog.configs().items() if catalog.recipe_of(path) == "full_dpo"]
    assert [line.split()[0] for lines in found.values() for line in lines] == of_recipe
    names = [line.split()[0] for lines in blocks(command("ls", "gemma")[1]).values() for line in lines]
    assert sorted(names) == [name for name in catalog.configs() if "gemma" in name]
    (line,) = [line for lines in blocks(command("ls", "full_dpo", "phi4")[1]).values() for line in lines]
    assert line.split()[0] == "phi4/mini_dpo"
    assert "precompute_logits" in command("ls", "precompute_logits")[1]  # a recipe without configs
    code, stdout, stderr = command("ls", "gemna")
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert "(did you mean 'gemma" in stderr


def test_a_config_that_may_not_be_looked_at_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: Path, *, follow: bool) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")  # which root never gets

    monkeypatch.setattr(catalog, "kind_of", closed)
    with pytest.raises(UserError, match=r"^closed/a\.yaml: cannot be read: Permission denied$"):
        catalog.find_config("closed/a.yaml")


def test_the_recipe_of_a_config_is_found_in_time_whatever_its_comments_are(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"# {'lptune run ' * 12_000}\n")
    begin = time.process_time()
    assert catalog.recipe_of(tmp_path / "c.yaml") == "full_finetune"
    assert time.process_time() - begin < 2  # `.*` takes 9 s, and 1,000 times as long for the largest config


def test_a_number_of_weights_has_three_digits() -> None:
    found = [count_text(number) for number in (268_098_176, 999_885_952, 1_235_814_400, 70_553_706_496)]
    assert found == ["268 M", "1.00 B", "1.24 B", "70.6 B"]


def test_the_gpu_holds_18_bytes_of_each_weight_and_leaves_a_tenth_free() -> None:
    assert needs(10**9) == "≥ 24 GB"  # 18 GB of 21.6
    assert needs(1_200_000_000) == "≥ 24 GB"  # 21.6 GB
    assert needs(1_200_000_001) == "≥ 48 GB"
    assert needs(4 * 10**9) == "≥ 80 GB"  # 72 GB
    assert needs(4 * 10**9 + 1) == "≥ 2x80 GB"
    assert needs(70_553_706_496) == "≥ 16x80 GB"  # 1129 GB, 72 on each


def test_a_config_with_another_optimizer_takes_what_it_keeps(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    for text, expected in (
        ("optimizer: {lr: 1.0e-5}", (16, 2)),
        ("optimizer: {kind: adamw_bf16}", (12, 2)),
        ("optimizer: {master: none}", (12, 0)),
        ("optimizer: {kind: adamw_8bit, master: none}", (6.0625, 0)),
        ("optimizer: {kind: adamw_8bit, master: none, in_backward: true}", (4.0625, 0)),
        ("optimizer:\n  kind: adamw_8bit\n  in_backward: true", (6.0625, 2)),
        ("optimizer:\n  kind: adamw_8bit", (10.0625, 2)),
        ("optimizer: {kind: adamw_7bit}", (16, 2)),  # refused where it is loaded
        ("# optimizer: {kind: adamw_8bit, master: none}", (16, 2)),
    ):
        config.write_text(f"model: {{path: x}}\n{text}\n")
        assert bytes_of(config) == expected, text
    assert needs(8_030_261_248, 6.0625, 0) == "≥ 80 GB"  # 48.7 GB, more than 43.2
    assert needs(8_030_261_248, 4.0625, 0) == "≥ 48 GB"
    assert needs(3_212_749_824, 6.0625, 0) == "≥ 24 GB"
    assert needs(70_553_706_496, 6.0625, 0) == "≥ 6x80 GB"


def test_lines_fit_a_terminal_and_stay_whole_in_a_pipe(command: Command) -> None:
    with terminal() as screen:
        ls.main([], standalone_mode=False)
    shown, piped = screen.getvalue().splitlines(), command("ls")[1].splitlines()
    assert max(map(len, shown)) <= 80
    assert "…" in shown[0]
    assert "…" not in piped[0]
    # No column of a config is cut at 80, only sentences.
    assert [line for line in shown if " GB  " in line] == [line for line in piped if " GB  " in line]
