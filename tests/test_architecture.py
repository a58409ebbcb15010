"""The rules of the layout, read with `ast`: who imports whom, what is banned, what is documented."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import banned

ROOT = Path(__file__).parents[1]

# A part may import the parts beside it (and itself); recipes may import everything.
ALLOWED = {
    "": {"base", "config"},  # the modules beside the parts, which every part may ask
    "config": set(),
    "base": {"config"},
    "hardware": {"config"},
    "launch": {"config"},
    "migrate": {"base", "config"},
    "numerics": {"config"},
    "kernels": {"base", "config", "hardware", "numerics"},
    "linear": {"config", "hardware", "numerics", "kernels"},
    "models": {"base", "config", "hardware"},
    "data": {"base", "config"},
    "doctor": {"config", "hardware", "launch", "kernels", "linear"},
    "distributed": {"config", "hardware", "launch", "numerics", "kernels", "linear", "models"},
    "checkpoint": {"base", "config", "launch", "numerics", "kernels", "linear", "models", "distributed"},
    "report": {"base", "config"},
    "sweep": {"base", "config"},
    "training": {
        "base", "config", "hardware", "numerics", "kernels", "linear", "models", "data", "distributed",
    },
    "inference": {
        "base", "config", "launch", "kernels", "linear", "models", "data", "distributed", "checkpoint",
    },
    "distillation": {"base", "config", "linear", "models", "data", "distributed", "checkpoint", "training"},
    "advice": {
        "config", "hardware", "kernels", "linear", "models", "data", "distributed", "inference", "training",
    },
    "cli": {
        "base", "advice", "config", "doctor", "hardware", "launch", "migrate", "models", "data", "checkpoint",
        "report", "sweep", "training",
    },
}  # fmt: skip
PEERS = {"transformers", "torchao", "torchtune"}
HEAVY = re.compile(
    r"torch|numpy|tokenizers|safetensors|huggingface_hub|lptune\.(?!base|cli|config|hardware|launch)"
)
MAX_LINES = {"recipes": 150, "lptune": 400}

LIBRARY = sorted((ROOT / "lptune").rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").rglob("*.py"))
FILES = [path.relative_to(ROOT).as_posix() for path in [*LIBRARY, *RECIPES]]


def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"), filename=file)


def imports(file: str) -> Iterator[tuple[str, int]]:
    """(module, line) of every import, inside functions too; `from lptune import data` is lptune.data."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def part(file: str) -> str:
    if file == "lptune/__main__.py":
        return "cli"
    return file.split("/")[1] if file.count("/") > 1 else ""


def test_every_part_has_its_row_in_the_table() -> None:
    assert {part(file) for file in FILES if file.startswith("lptune/")} - {""} <= set(ALLOWED)


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("lptune/")])
def test_imports_point_one_way(file: str) -> None:
    for module, line in imports(file):
        names = module.split(".")
        if names[0] == "lptune" and len(names) > 1 and names[1] in ALLOWED:
            target = names[1]
            assert target == part(file) or target in ALLOWED.get(part(file), set()), (
                f"{file}:{line}: {module}"
            )
        assert names[0] != "recipes", f"{file}:{line}: recipes are run, not imported"


@pytest.mark.parametrize("file", FILES)
def test_nothing_banned_is_imported_or_called(file: str) -> None:
    for module, line in imports(file):
        assert module.split(".")[0] not in PEERS, f"{file}:{line}: {module}"
    found = list(banned.uses((ROOT / file).read_text(encoding="utf-8"), file))
    assert not found, f"{file}: {found}"


def test_each_ban_finds_what_is_planted_under_any_name() -> None:
    def names(source: str) -> set[str]:
        return {name for _, name, _ in banned.uses(source)}

    for name in banned.BANNED:
        module, _, leaf = name.rpartition(".")
        planted = [f"{name}('x')"]
        if module:
            planted += [f"import {module} as m\nm.{leaf}('x')", f"from {module} import {leaf} as f\nf('x')"]
        for source in planted:
            assert name in names(source), source
    for name in banned.METHODS:
        assert name in names(f"from torch import distributed as dist\ndist.{name}([1])")
        assert name in names(f"make().{name}([1])")
    for name in banned.ARGUMENTS:
        assert name in names(f"run(['x'], {name}=flag)")
        assert not names(f"run(['x'], {name}=False)")


def test_what_may_break_a_ban_does() -> None:
    for (file, name), why in banned.ALLOWED.items():
        source = (ROOT / file).read_text(encoding="utf-8")
        assert name in {name for _, name, _ in banned.uses(source)}, f"{file} no longer needs it: {why}"


def test_ruff_bans_each_of_its_names(tmp_path: Path) -> None:
    ruff = pytest.importorskip("ruff").find_ruff_bin()
    with (ROOT / "pyproject.toml").open("rb") as file:
        api = tomllib.load(file)["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    planted = "".join(f"import {name.rpartition('.')[0] or name}\n{name}\n" for name in api)
    command = [
        ruff,
        "check",
        "--config",
        ROOT / "pyproject.toml",
        "--select",
        "TID251",
        "--output-format=concise",
    ]
    done = subprocess.run([*command, "--stdin-filename", ROOT / "lptune" / "x.py", "-"], input=planted,
                          capture_output=True, text=True)  # fmt: skip
    for name in api:
        assert f"`{name}` is banned" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES)
def test_every_file_keeps_its_size_and_opens_with_a_docstring(file: str) -> None:
    num_lines = len((ROOT / file).read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES[file.split("/")[0]], f"{file} has {num_lines} lines"
    assert ast.get_docstring(tree(file)), f"{file} has no docstring"


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("lptune/")])
def test_public_classes_and_functions_have_docstrings(file: str) -> None:
    for node in tree(file).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{file}:{node.lineno}: {node.name} has no docstring"


def public_docstrings(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """(line, docstring) of public functions and classes, and of the public methods of such classes."""
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and (
            not node.name.startswith("_") or node.name.startswith("__")
        ):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                yield node.lineno, docstring
            if isinstance(node, ast.ClassDef):
                yield from public_docstrings(node.body)


def test_no_public_docstring_has_fewer_than_five_words() -> None:
    short = [
        f"{file}:{line}: {docstring}"
        for file in FILES
        for line, docstring in public_docstrings(tree(file).body)
        if len(docstring.split()) < 5
    ]
    assert not short, f"say more, or delete them: {short}"


def test_config_imports_no_torch_and_the_cli_launch_and_hardware_none_at_the_top() -> None:
    for file in FILES:
        if part(file) == "config":
            assert not [line for module, line in imports(file) if module.split(".")[0] == "torch"], file
        if part(file) in ("cli", "hardware", "launch"):
            for node in tree(file).body:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                heavy = [name for name in names if HEAVY.match(name)]
                assert not heavy, f"{file}:{node.lineno}: {heavy}"


def test_every_config_field_is_documented_under_it() -> None:
    num_fields = 0
    files = ("lptune/config/schema.py", "lptune/config/recipes.py", "lptune/config/inference.py")
    for node in [each for file in files for each in tree(file).body]:
        if not isinstance(node, ast.ClassDef):
            continue
        assert ast.get_docstring(node), node.name
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            # A section is documented by its own class.
            if isinstance(field, ast.AnnAssign) and not ast.unparse(field.annotation).endswith("Config"):
                num_fields += 1
                documented = (
                    isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                    and isinstance(after.value.value, str)
                )
                assert documented, f"{node.name}.{ast.unparse(field.target)} has no line of documentation"
    assert num_fields > 40


def test_relative_links_of_the_documentation_resolve() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def defined(file: str) -> set[str]:
    """`name` of the functions and classes at the top of a file, and `Class.method`."""
    names = set()
    for node in tree(file).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            names |= {f"{node.name}.{name}" for name in methods}
    return names


def test_every_function_that_the_architecture_page_names_exists() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:lptune|recipes)/[\w/]+\.py):([\w.]+)`", page)
    assert len(named) > 60
    missing = [
        f"{file}:{name}" for file, name in named if not (ROOT / file).is_file() or name not in defined(file)
    ]
    assert not missing, f"docs/architecture.md names what there is not: {missing}"
    paths = re.findall(r"`((?:lptune|recipes|configs)/[\w/.]*)`", page)
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_walk_from_the_command_line_to_a_kernel_counts_its_files() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("\n## From the command line to a kernel\n")
    walk, _, _ = rest.partition("\n## ")
    (num_files,) = re.findall(r"\*\*(\d+) files\*\*", walk)
    steps = "\n".join(re.findall(r"^\d+\. .*$", walk, re.MULTILINE))
    assert len(set(re.findall(r"`([\w/]+\.py):", steps))) == int(num_files)


STARTS = {"sys.executable", "os.fork", "multiprocessing.get_context", "multiprocessing.Process"}
STARTED_BY = {
    "tests/helpers/cold.py": "as a user does",
    "tests/helpers/fork_server.py": "forked off one that has imported torch",
    "tests/faults/kills.py": "forked off one that has just prepared what is killed",
    "tests/proofs/bits.py": "imports no helper, for it runs any commit",
    "tests/faults/adversary/child.py": "starts none: pretends to a command line",
    "tests/config/test_extras.py": "starts none: compares a text",
}


def test_an_interpreter_is_started_warm_or_cold_by_a_helper_and_nowhere_else() -> None:
    """Scripts that are the text of a test may start what they like: that is what their test is about."""
    found = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in STARTS:
                found.add(path.relative_to(ROOT).as_posix())
    assert found == STARTED_BY.keys()


def test_the_files_that_are_to_run_first_exist(pytestconfig: pytest.Config) -> None:
    (conftest,) = [
        plugin
        for plugin in pytestconfig.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(ROOT / "tests" / "conftest.py")
    ]
    assert conftest.LONGEST
    assert [name for name in conftest.LONGEST if not (ROOT / "tests" / name).is_file()] == []
