"""ls, cat, cp and validate: what is found by name, and what a misspelt name gets."""

# ruff: noqa: E501  (messages are compared whole)

import errno
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from lptune.base.errors import UserError
from lptune.cli import catalog, recipe
from tests.cli.conftest import Command, write_model
from tests.helpers import cold

GOOD = "model: {path: a}\ndata: {source: builtin}\n"


def test_ls_puts_a_config_below_the_recipe_that_its_comment_runs(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / "recipes").mkdir(exist_ok=True)
        (tmp_path / "recipes" / f"{name}.py").write_text(f'"""Recipe {name}."""\n')
    (tmp_path / "configs" / "a").mkdir(parents=True)
    text = "# X: small,\n# quick. Nothing else.\n#\n#   lptune run two --config a/x\nseed: 1\n"
    (tmp_path / "configs/a/x.yaml").write_text(text)
    (tmp_path / "configs/a/y.yaml").write_text("#   lptune run one --config a/y\n")
    monkeypatch.setattr(catalog, "folder", lambda kind: tmp_path / kind)
    shown = "one  Recipe one.\n  a/y  lptune run one --config a/y\ntwo  Recipe two.\n  a/x  X: small, quick\n"
    assert command("ls") == (0, shown, "")


def test_cat_prints_the_file(command: Command) -> None:
    for name, path in (
        ("full_finetune", catalog.recipes()["full_finetune"]),
        ("qwen3/8b", catalog.configs()["qwen3/8b"]),
    ):
        assert command("cat", name) == (0, path.read_text(), "")


def test_a_file_that_is_no_text_or_cannot_be_read_is_one_line(command: Command) -> None:
    Path("binary.py").write_bytes(b"\xff\xfe")
    for name in ("binary.py", "/proc/self/mem"):
        for arguments in (["cat", name], ["run", name, "--config", "quickstart"]):
            code, stdout, stderr = command(*arguments)
            assert (code, stdout, stderr.count("\n")) == (2, "", 1), arguments
            assert stderr.startswith(f"error: {name}: is not "), stderr


def test_cp_takes_recipes_and_configs_home(command: Command) -> None:
    assert command("cp", "full_finetune", "mine.py") == (0, "copied full_finetune to mine.py\n", "")
    assert Path("mine.py").read_text() == catalog.recipes()["full_finetune"].read_text()
    assert command("cp", "llama3_2/1b", ".")[0] == 0
    assert Path("1b.yaml").read_text() == catalog.configs()["llama3_2/1b"].read_text()
    assert command("cp", "llama3_2/1b", "a/b/c.yaml") == (
        2,
        "",
        "error: a/b: no such folder; make it, or add --parents\n",
    )
    assert command("cp", "llama3_2/1b", "a/b/c.yaml", "--parents")[0] == 0
    assert command("validate", "a/b/c.yaml", "data.source=x.jsonl", "--recipe", "mine.py")[0] == 0
    assert command("cp", "--make-parents", "llama3_2/1b", "d/e/c.yaml")[0] == 0  # as torchtune writes it
    refused = "error: mine.py: is a file, where a folder is needed\n"
    assert command("cp", "llama3_2/1b", "mine.py/c.yaml", "--parents") == (2, "", refused)
    code, _, stderr = command("cp", "full_finetune", "/proc/x/y/z.py", "--parents")
    assert (code, stderr.count("\n")) == (2, 1)


def test_cp_never_overwrites_unless_forced(command: Command) -> None:
    Path("mine.py").write_text("mine")
    assert command("cp", "full_finetune", "mine.py") == (
        2,
        "",
        "error: mine.py: exists; add --force to overwrite it\n",
    )
    assert Path("mine.py").read_text() == "mine"
    assert command("cp", "full_finetune", "mine.py", "--force")[0] == 0
    assert Path("mine.py").read_text() != "mine"
    Path("link.py").symlink_to("elsewhere.py")
    assert command("cp", "full_finetune", "link.py")[2].startswith("error: link.py: exists")
    assert not Path("elsewhere.py").exists()
    assert command("cp", "full_finetune", "link.py", "--force")[0] == 0
    assert not Path("link.py").is_symlink()
    assert not Path("elsewhere.py").exists()
    Path("precious").write_text("precious")
    os.link("precious", "second_name.py")
    Path("to_precious.py").symlink_to("precious")
    for name in ("second_name.py", "to_precious.py"):
        assert command("cp", "full_finetune", name, "--force") == (0, f"copied full_finetune to {name}\n", "")
        assert Path(name).read_text() == catalog.recipes()["full_finetune"].read_text()
        assert Path(name).stat().st_mode == Path("mine.py").stat().st_mode == Path("precious").stat().st_mode
    assert Path("precious").read_text() == "precious"
    os.mkfifo("pipe")
    Path("to_pipe").symlink_to("pipe")  # as /dev/stdout is
    for name in ("pipe", "to_pipe"):
        message = f"error: {name}: cannot be overwritten by full_finetune; choose another DEST\n"
        assert command("cp", "full_finetune", name, "--force") == (2, "", message)
    assert not list(Path().glob(".tmp*"))
    own = str(catalog.recipes()["full_finetune"])
    assert command("cp", "full_finetune", own, "--force")[0] == 2
    assert Path(own).stat().st_size


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        (catalog.find_recipe, "base.yaml", "base.yaml: is a config; give the name or the path of a recipe"),
        (catalog.find_recipe, "llama3_2/1b", "llama3_2/1b: is a config; give the name or the path of a recipe"),
        (catalog.find_config, "full_finetune", "full_finetune: is a recipe; give the name or the path of a config"),
        (catalog.find_config, "mine.py", "mine.py: is a recipe; give the name or the path of a config"),
        (catalog.find_recipe, "full_finetun", "full_finetun: no such recipe (did you mean 'full_finetune'?)"),
        (catalog.find_recipe, "recipes/full_fintune.py", "recipes/full_fintune.py: no such recipe (did you mean 'full_finetune'?)"),
        (catalog.find_config, "llama3_2/1B", "llama3_2/1B: no such config (did you mean 'llama3_2/1b'?)"),
        (catalog.find_config, "lama3_2/1b.yaml", "lama3_2/1b.yaml: no such config (did you mean 'llama3_2/1b'?)"),
        (catalog.find_config, "configs/llama3_2/2b.yaml", "configs/llama3_2/2b.yaml: no such config (did you mean 'llama3_2/"),
        (catalog.find_config, "zzzzz", "zzzzz: no such config; `lptune ls` shows what there is"),
        (catalog.find_config, "/", "/: is a folder; give the name or the path of a config"),
    ],
)  # fmt: skip
def test_an_unknown_name_gets_the_closest_one(find, name: str, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError) as caught:
        find(name)
    assert str(caught.value).startswith(message)


def test_a_recipe_and_a_config_of_one_name_both_run_and_neither_is_taken_for_the_other(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from lptune.config import FinetuneConfig\n\ndef main(cfg: FinetuneConfig) -> None:\n    print(cfg.seed)\n"
    for folder, file, content in (("recipes", "twin.py", text), ("configs", "twin.yaml", GOOD + "seed: 7\n")):
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
    keys = GOOD + "eval_every_steps: 2\n"
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


def test_a_recipe_of_any_size_is_not_read(command: Command) -> None:
    with open("huge.py", "wb") as file:
        file.truncate(recipe.MAX_CHARS + 1)
    too_long = f"it is longer than {recipe.MAX_CHARS:,} characters, so it is something else\n"
    for arguments, reason in (
        (["cat", "huge.py"], "is not text"),
        (["run", "huge.py", "--config", "quickstart"], "is not a Python file"),
        (["validate", "huge.py", "--config", "quickstart"], "is not a Python file"),
    ):
        assert command(*arguments) == (2, "", f"error: huge.py: {reason}: {too_long}"), arguments


@pytest.mark.parametrize("kind", ["recipe", "config", "recipe or config"])
def test_what_is_no_file_is_named_as_what_it_is(command: Command, kind: str) -> None:
    os.mkfifo("pipe")
    Path("to_pipe").symlink_to("pipe")
    Path("circle").symlink_to("circle")
    Path("nothing").symlink_to("nowhere")
    give = f"give the name or the path of a {kind}"
    for name, reason in {
        "pipe": f"is a pipe; {give}",
        "to_pipe": f"is a pipe; {give}",
        "/dev/zero": f"is a device or socket; {give}",
        "circle": f"is a link; {give}",
        "nothing": f"no such {kind}; `lptune ls` shows what there is",
    }.items():
        arguments = {
            "recipe": ["run", name, "--config", "quickstart"],
            "config": ["run", "full_finetune", "--config", name],
            "recipe or config": ["cat", name],
        }[kind]
        assert command(*arguments) == (2, "", f"error: {name}: {reason}\n")


def test_a_recipe_or_config_that_may_not_be_looked_at_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Path.stat

    def stat(self: Path, **options: bool) -> os.stat_result:
        if self.name == "a.yaml":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return before(self, **options)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(UserError, match=r"^closed/a\.yaml: cannot be read: Permission denied$"):
        catalog.find_config("closed/a.yaml")


def test_validate_says_ok_and_notes_what_is_not_here_yet(command: Command) -> None:
    Path("c.yaml").write_text(GOOD)
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


def test_a_usage_error_is_one_line(command: Command) -> None:
    code, stdout, stderr = command("rn")
    assert (code, stdout) == (2, "")
    assert re.fullmatch(
        r"error: No such command 'rn'.*did you mean 'run'.*; see `lptune --help`\n", stderr, re.IGNORECASE
    )
    for arguments in (
        ["--vresion"],
        ["cat"],
        ["cp", "full_finetune"],
        ["ls", "more"],
        ["validate", "--recip", "x"],
    ):
        code, stdout, stderr = command(*arguments)
        assert (code, stdout, stderr.count("\n")) == (2, "", 1), stderr
        assert stderr.startswith("error: ")


def test_without_a_command_the_help_is_shown(command: Command) -> None:
    code, stdout, _ = command()
    assert code == 0
    assert stdout == command("--help")[1]
    assert "new-checkpoint" in stdout


WRONG = {
    "sed=1": ("unknown key 'sed' (did you mean 'seed'?)",),
    "micro_batch_size=8": ("do not divide among 3 data ranks; set global_batch_size to a multiple of 3,",),
    "parallel.tensor=2": ("tensor=2 needs a multiple of 2 ranks, found 3",),
    "model.path=nowhere": ("model.path: nowhere is not a folder; `lptune download` fetches one",),
    "data.source=rows.jsnl.json": ("rows.jsnl.json: no such file; set data.source to a file",),
    "precision.kind=float8_rowwise": ("float8_rowwise needs a device", "precision.emulate=true"),
}
"""An argument -> what `lptune run` says of it, before torch is imported."""
RUN = ["full_finetune", "--config", "quickstart", "model.path=.", "device=cpu"]


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["run", "--help"], ["validate", "--help"], ["ls"], ["validate", "llama3_2/1b", "data.source=rows.jsonl", "seed=1"], ["new-checkpoint", "--help"], ["plan", "--help"], ["run", "-h"],
     ["validate", "full_finetune", "--config", "quickstart", "seed=1"],
     *(["run", "--nproc-per-node", "3", *RUN, wrong] for wrong in list(WRONG)[:3]), *(["run", *RUN, wrong] for wrong in list(WRONG)[3:])],
    ids=" ".join,
)  # fmt: skip
def test_help_ls_and_validate_import_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    program = (
        "import atexit, sys\n"
        "from lptune.cli.main import main\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'huggingface_hub', 'safetensors', 'jinja2'}\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    done = cold.run("-c", program, *arguments, folder=tmp_path)
    assert done.returncode == (2 if arguments[-1] in WRONG else 0), done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY []"
    for word in WRONG.get(arguments[-1], ()):
        assert word in done.stderr


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    command = f"{' '.join(cold.command('-m', 'lptune'))} cat full_finetune | head -1"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=cold.environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("part", ["lptune run ", "lptune run x", "a ", "#", "\n# lptune run "])
def test_the_recipe_of_a_config_is_found_in_time_whatever_its_comments_are(tmp_path: Path, part: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("# " + part * (2**17 // len(part)) + "\n")
    begin = time.process_time()
    assert catalog.recipe_of(path) == "full_finetune"
    assert time.process_time() - begin < 2  # `.*` took 9 s, and 1,000 times as long for the largest config
