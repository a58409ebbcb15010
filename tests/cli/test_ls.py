"""`lptune ls`: sizes, memory and hub ids of the configs, in any width of a terminal."""

import ast
import os
import pty
from pathlib import Path

import pytest

from lptune.cli import catalog
from lptune.cli.ls import count_text, needs, num_weights, row
from tests.cli.conftest import Command
from tests.helpers import cold


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


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (268_098_176, "268 M"),
        (999_885_952, "1.00 B"),
        (1_235_814_400, "1.24 B"),
        (70_553_706_496, "70.6 B"),
    ],
)
def test_counts_have_three_digits(number: int, text: str) -> None:
    assert count_text(number) == text


def test_the_gpu_holds_18_bytes_of_each_weight_and_leaves_a_tenth_free() -> None:
    assert needs(10**9) == "≥ 24 GB"  # 18 GB of 21.6
    assert needs(1_200_000_000) == "≥ 24 GB"  # 21.6 GB
    assert needs(1_200_000_001) == "≥ 48 GB"
    assert needs(4 * 10**9) == "≥ 80 GB"  # 72 GB
    assert needs(4 * 10**9 + 1) == "≥ 2 x 80 GB"
    assert needs(70_553_706_496) == "≥ 16 x 80 GB"  # 1129 GB, 72 on each


def on_terminal(width: int, folder: Path) -> str:
    """What `lptune ls` prints on a terminal of this width."""
    parent, child = pty.openpty()
    columns = {"COLUMNS": str(width)}
    with cold.start(
        "-m", "lptune", "ls", folder=folder, variables=columns, stdout=child, stderr=child
    ) as process:
        os.close(child)
        parts = []
        while True:
            try:
                part = os.read(parent, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not part:
                break
            parts.append(part)
    os.close(parent)
    assert process.returncode == 0
    return b"".join(parts).decode().replace("\r\n", "\n")


def test_lines_fit_a_terminal_and_stay_whole_in_a_pipe(command: Command, tmp_path: Path) -> None:
    shown = on_terminal(80, tmp_path)
    assert max(map(len, shown.splitlines())) <= 80
    piped = command("ls")[1]
    assert "…" in shown.splitlines()[0]
    assert "…" not in piped.splitlines()[0]
    # No column of a config is cut at 80, only sentences.
    assert [line for line in shown.splitlines() if " GB  " in line] == [
        line for line in piped.splitlines() if " GB  " in line
    ]


def test_ls_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom lptune.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n    print('TORCH', 'torch' in sys.modules)\n"
    )
    done = cold.run("-c", program, "ls", "gemma", folder=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "TORCH False"), done.stderr
