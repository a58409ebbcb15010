"""The rules of the layout, read with `ast`: who imports whom, what is banned, what is documented.

A rule is a function of one source file, which gives a line for each offence: where, what, what to do. A test
names the offences of all files at once. RULES has them beside offences that each must find.
"""

import ast
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

# A part may import the parts beside it, itself and base; recipes may import everything.
ALLOWED = {
    "": set(),  # the modules beside the parts
    "base": set(),
    "config": set(),
    "hardware": set(),
    "launch": {"config"},
    "numerics": set(),
    "kernels": {"hardware", "numerics"},
    "linear": {"config", "hardware", "numerics", "kernels"},
    "models": {"hardware"},
    "data": {"config"},
    "distributed": {"config", "hardware", "launch", "numerics", "kernels", "linear", "models"},
    "checkpoint": {"config", "launch", "numerics", "kernels", "linear", "models", "distributed"},
    "training": {
        "config", "hardware", "numerics", "kernels", "linear", "models", "data", "distributed", "checkpoint",
    },
    "inference": {
        "config", "launch", "kernels", "linear", "models", "data", "distributed", "checkpoint",
    },
    "distillation": {"config", "linear", "models", "data", "distributed", "checkpoint", "training"},
    "plan": {"config", "hardware", "kernels", "linear", "models", "distributed", "training"},
    "cli": {"config", "hardware", "launch", "models", "data", "checkpoint", "training", "plan"},
    "tools": {
        "config", "hardware", "launch", "kernels", "linear", "models", "data", "distributed", "inference",
        "training", "plan", "cli",
    },  # no other row has them
}  # fmt: skip
PEERS = {"transformers", "torchao", "torchtune"}
MAY_IMPORT = re.compile(r"transformers of lptune/(data/hf_process\.py|models/hf/\w+\.py)")
HEAVY = re.compile(
    r"torch|numpy|tokenizers|safetensors|huggingface_hub"
    r"|lptune\.(?!base|cli|config|hardware|launch|__version__$)"
)
MAX_LINES = {"recipes": 150, "lptune": 800}
# Keyword-only classes of config: a source overrides keys of DataConfig, and a Section is no part of a config.
NO_KEYS_OF_THEIR_OWN = {"SourceConfig", "Section"}


class Source(NamedTuple):
    """A file of the library or a recipe."""

    file: str
    """Its path from the root, with slashes."""
    text: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """The folder of lptune/ it is in; "" for the modules beside the folders and for recipes."""
        if self.file == "lptune/__main__.py":
            return "cli"
        return self.file.split("/")[1] if self.file.count("/") > 1 else ""

    @property
    def is_library(self) -> bool:
        return self.file.startswith("lptune/")


def read(file: str, text: str | None = None) -> Source:
    """The file as it is, or as it would be with `text`."""
    text = (ROOT / file).read_text(encoding="utf-8") if text is None else text
    return Source(file, text, ast.parse(text, filename=file))


@cache
def sources() -> list[Source]:
    """All of them. Not when this module is imported: every worker imports it, and one runs its tests."""
    return [
        read(path.relative_to(ROOT).as_posix())
        for folder in ("lptune", "recipes")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def imports(body: ast.AST) -> Iterator[tuple[str, int]]:
    """(module, line) of every import, inside functions too; `from lptune import data` is lptune.data."""
    for node in ast.walk(body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def imports_point_one_way(source: Source) -> Iterator[str]:
    if not source.is_library:
        return
    if source.part not in ALLOWED:
        yield f"{source.file}: {source.part} has no row in ALLOWED; add it with what it may import"
    others = ALLOWED.keys() - {"", "base", source.part, *ALLOWED.get(source.part, ())}
    for module, line in imports(source.tree):
        first, target = (*module.split("."), "")[:2]
        if first == "recipes":
            yield f"{source.file}:{line}: {module}; recipes are run, not imported: move it to lptune/"
        elif first == "lptune" and target in others:
            importer = source.part or "lptune/*.py"
            yield f"{source.file}:{line}: {module}; ALLOWED says what {importer} may import"


def imports_are_absolute(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"{source.file}:{node.lineno}: relative import; begin it with lptune"


def uses_nothing_banned(source: Source) -> Iterator[str]:
    for module, line in imports(source.tree):
        peer = module.split(".")[0]
        if peer in PEERS and not MAY_IMPORT.fullmatch(f"{peer} of {source.file}"):
            yield f"{source.file}:{line}: {module}; tests compare with it, nothing here needs it"
    for node in ast.walk(source.tree):  # what ruff cannot see of pyproject.toml's banned-api
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in ("compile", "__import__"):
            yield f"{source.file}:{node.lineno}: {node.func.id}; text of a file or a user becomes code"
        for keyword in node.keywords:
            is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in ("shell", "trust_remote_code", "allow_pickle", "weights_only") and not is_false:
                yield f"{source.file}:{node.lineno}: {keyword.arg}; a stranger's text or code runs"


def imports_no_torch_before_it_must(source: Source) -> Iterator[str]:
    """config never imports torch; cli, hardware, launch and the tools' commands import nothing heavy at the
    top."""
    if source.part == "config":
        for module, line in imports(source.tree):
            if module.split(".")[0] == "torch":
                yield f"{source.file}:{line}: {module}; config is read without torch"
    elif source.part in ("cli", "hardware", "launch") or source.file.endswith("/command.py"):
        for node in source.tree.body:
            at_top = imports(node) if isinstance(node, (ast.Import, ast.ImportFrom)) else ()
            for module, line in at_top:
                if HEAVY.match(module):
                    yield f"{source.file}:{line}: {module}; import it in the function that uses it"


def keeps_its_size(source: Source) -> Iterator[str]:
    limit, num_lines = MAX_LINES[source.file.split("/")[0]], len(source.text.splitlines())
    if num_lines > limit:
        yield f"{source.file}: {num_lines} lines of at most {limit}; has it two subjects?"


def is_documented(source: Source) -> Iterator[str]:
    """A docstring at the top; in the library one for each public class and function; none says nothing."""
    if not ast.get_docstring(source.tree):
        yield f"{source.file}: no docstring; say what the file is about"
    for node in source.tree.body if source.is_library else ():
        public = isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
        if public and not ast.get_docstring(node):
            yield f"{source.file}:{node.lineno}: {node.name} has no docstring; write its contract"
    for line, docstring in public_docstrings(source.tree.body):
        if len(docstring.split()) < 5:
            yield f"{source.file}:{line}: {docstring!r}; say more, or delete it"


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


def documents_each_config_field(source: Source) -> Iterator[str]:
    """A keyword-only class of config has a docstring, and so has each field that is no section, under it."""
    if source.part != "config":
        return
    for cls in source.tree.body:
        if not isinstance(cls, ast.ClassDef) or cls.name in NO_KEYS_OF_THEIR_OWN:
            continue
        if "kw_only=True" not in map(ast.unparse, _arguments(cls)):
            continue
        if not ast.get_docstring(cls):
            yield f"{source.file}:{cls.lineno}: {cls.name}; write a docstring, which `keys` shows"
        for field, after in zip(cls.body, [*cls.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and not ast.unparse(field.annotation).endswith("Config"):
                documented = (
                    isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                    and isinstance(after.value.value, str)
                )
                if not documented:
                    name = f"{cls.name}.{ast.unparse(field.target)}"
                    yield f"{source.file}:{field.lineno}: {name}; write a string under it, which `keys` shows"


def _arguments(cls: ast.ClassDef) -> list[ast.keyword]:
    """The keyword arguments of its decorators."""
    return [each for call in cls.decorator_list if isinstance(call, ast.Call) for each in call.keywords]


FIELDS = "@dataclass(frozen=True, kw_only=True)\nclass X:\n    'A section.'\n"
Rule = Callable[[Source], Iterator[str]]
RULES: dict[Rule, tuple[tuple[str, str, str], ...]] = {
    imports_point_one_way: (
        ("lptune/gadgets/x.py", "", "gadgets has no row"),
        ("lptune/numerics/x.py", "\nimport lptune.kernels.op", ":2: lptune.kernels.op"),
        ("lptune/numerics/x.py", "def f():\n    from lptune import kernels", ":2: lptune.kernels"),
        ("lptune/models/x.py", "from lptune.training.update import Update", "what models may import"),
        ("lptune/base/x.py", "from lptune.config import RunConfig", "what base may import"),
        ("lptune/x.py", "from lptune.data import rows", "what lptune/*.py may import"),
        ("lptune/training/x.py", "import recipes.full_finetune", "recipes are run"),
        ("lptune/cli/x.py", "def f():\n    from lptune.tools import report", ":2: lptune.tools.report"),
    ),
    imports_are_absolute: (
        ("lptune/data/x.py", "def f():\n    from . import rows", ":2: relative"),
        ("recipes/x.py", "from ..lptune import data", ":1: relative"),
    ),
    uses_nothing_banned: (
        *(("lptune/x.py", f"import {name}.x", name) for name in sorted(PEERS)),
        ("recipes/x.py", "def f():\n    from transformers import x", ":2: transformers"),
        ("recipes/x.py", "compile('x', '', 'exec')", ":1: compile"),
        ("lptune/x.py", "run('x',\n    shell=flag)", ":1: shell"),
    ),
    imports_no_torch_before_it_must: (
        ("lptune/config/x.py", "def f():\n    import torch.nn", ":2: torch.nn"),
        ("lptune/cli/x.py", "import numpy", "numpy"),
        ("lptune/__main__.py", "from torch import nn", "torch.nn"),
        ("lptune/hardware/x.py", "from lptune.linear import convert", "lptune.linear"),
        ("lptune/launch/x.py", "from lptune import models", "lptune.models"),
        ("lptune/tools/x/command.py", "from lptune.tools.report.page import page", "lptune.tools.report"),
    ),
    keeps_its_size: (
        ("lptune/data/x.py", "\n" * 801, "801 lines"),
        ("recipes/x.py", "\n" * 151, "151 lines"),
    ),
    is_documented: (
        ("lptune/data/x.py", "import ast", "no docstring"),
        ("recipes/x.py", "import ast", "no docstring"),
        ("lptune/x.py", "class Rows:\n    pass", "Rows has no docstring"),
        ("lptune/x.py", "def rows():\n    pass", "rows has no docstring"),
        ("recipes/x.py", "class A:\n    def f():\n        'Does it.'", ":2: 'Does it.'"),
    ),
    documents_each_config_field: (
        ("lptune/config/x.py", f"{FIELDS}    a: int\n    'A.'\n    b: int", ":6: X.b"),
        ("lptune/config/x.py", f"{FIELDS}    a: int\n    b: int\n    'B.'", ":4: X.a"),
        ("lptune/config/x.py", "@dataclass(kw_only=True)\nclass _X:\n    pass", ":2: _X"),
    ),
}  # fmt: skip
"""rule -> (file, its text, what the rule says of it)."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_file_breaks_the_rule(rule: Rule) -> None:
    assert {"lptune/__init__.py", "recipes/full_finetune.py"} <= {each.file for each in sources()}
    found = "\n".join(line for each in sources() for line in rule(each))
    assert not found, found


def test_each_rule_finds_what_is_planted() -> None:
    missed = [
        (rule.__name__, file, text)
        for rule, planted in RULES.items()
        for file, text, said in planted
        if not any(line.startswith(file) and said in line for line in rule(read(file, text)))
    ]
    assert not missed


def test_ruff_finds_what_turns_text_into_actions_and_none_is_here() -> None:
    ruff = pytest.importorskip("ruff").find_ruff_bin()
    with (ROOT / "pyproject.toml").open("rb") as file:
        api = tomllib.load(file)["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    planted = "".join(f"import {name.rpartition('.')[0] or name}\n{name}\n" for name in api)
    planted += "eval('x')\nexec('x')\nrun('x', shell=True)\n"

    def found(*arguments: str | Path, given: str = "") -> str:
        command = [ruff, "check", "--config", "pyproject.toml", "--output-format=concise", *arguments]
        return subprocess.run(command, cwd=ROOT, input=given, capture_output=True, text=True).stdout

    said = found("--stdin-filename", "lptune/x.py", "-", given=planted)
    assert [name for name in api if f"`{name}` is banned" not in said] == []
    assert [rule for rule in ("S102", "S307", "S604") if rule not in said] == []
    assert found("--select", "TID251,S102,S301,S302,S306,S307,S506,S602,S604,S605", "lptune", "recipes") == (
        "All checks passed!\n"
    )


def defined(file: str) -> set[str]:
    """`name` of the functions and classes at the top of a file, and `Class.method`."""
    names = set()
    for node in read(file).tree.body:
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
    "tests/base/test_errors.py": "starts none: compares a text",
    "tests/data/test_templates.py": "forks itself: what a fork inherits is the test",
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
    assert [name for name in conftest.LONGEST if not (ROOT / "tests" / f"{name}.py").is_file()] == []
