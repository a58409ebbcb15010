"""`lptune ls`: sizes, memory and hub ids of the configs, in any width of a terminal."""

import ast

from lptune.cli import catalog
from lptune.cli.ls import ls, needs, num_weights, row
from tests.base.test_progress import terminal
from tests.cli.conftest import Command


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


def test_the_gpu_holds_18_bytes_of_each_weight_and_leaves_a_tenth_free() -> None:
    assert needs(10**9) == "≥ 24 GB"  # 18 GB of 21.6
    assert needs(1_200_000_000) == "≥ 24 GB"  # 21.6 GB
    assert needs(1_200_000_001) == "≥ 48 GB"
    assert needs(4 * 10**9) == "≥ 80 GB"  # 72 GB
    assert needs(4 * 10**9 + 1) == "≥ 2 x 80 GB"
    assert needs(70_553_706_496) == "≥ 16 x 80 GB"  # 1129 GB, 72 on each


def test_lines_fit_a_terminal_and_stay_whole_in_a_pipe(command: Command) -> None:
    with terminal() as screen:
        ls.main([], standalone_mode=False)
    shown, piped = screen.getvalue().splitlines(), command("ls")[1].splitlines()
    assert max(map(len, shown)) <= 80
    assert "…" in shown[0]
    assert "…" not in piped[0]
    # No column of a config is cut at 80, only sentences.
    assert [line for line in shown if " GB  " in line] == [line for line in piped if " GB  " in line]
