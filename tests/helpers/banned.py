"""What library and recipes must never use, and why: the calls that turn a file's bytes into actions.

ruff bans names (pyproject.toml); this check sees more: aliases, arguments, and methods by any receiver.
`uses(source)` gives every banned use in a Python source, `tests/test_architecture.py` asserts that there is
none, and that each row of the tables is found when it is planted.
"""

import ast
import builtins
from collections.abc import Iterator

UNPICKLES = "unpickling runs what the file says; tensors live in safetensors, the rest in JSON"
RUNS_TEXT = "text of a file or a user becomes code"
BANNED = {
    "pickle": UNPICKLES, "cPickle": UNPICKLES, "_pickle": UNPICKLES, "dill": UNPICKLES,
    "cloudpickle": UNPICKLES, "joblib": UNPICKLES, "marshal": UNPICKLES, "shelve": UNPICKLES,
    "torch.load": UNPICKLES,
    "torch.serialization": UNPICKLES,
    "torch.jit.load": "a TorchScript archive holds pickles and code",
    "torch.package": "packages hold pickles and code",
    "torch.export.load": "an exported program holds pickles",
    "torch.hub": "it downloads code and runs it",
    "torch.distributed.checkpoint.load": "DCP's .metadata is a pickle",
    "torch.distributed.checkpoint.FileSystemReader": "DCP's .metadata is a pickle",
    "numpy.load": "an array of objects is a pickle; numpy arrays are made, never loaded",
    "yaml.load": "tags make objects; configs are read by lptune.config alone, through OmegaConf",
    "yaml.load_all": "tags make objects", "yaml.full_load": "tags make objects",
    "yaml.unsafe_load": "tags make objects", "yaml.UnsafeLoader": "tags make objects",
    "yaml.FullLoader": "tags make objects", "yaml.Loader": "tags make objects",
    "eval": RUNS_TEXT, "exec": RUNS_TEXT, "compile": RUNS_TEXT, "__import__": RUNS_TEXT,
    "runpy": RUNS_TEXT,
    "importlib.import_module": RUNS_TEXT,
    "importlib.util.spec_from_file_location": RUNS_TEXT,
    "jinja2.Environment": "templates of strangers run in lptune/data/hf_process.py",
    "jinja2.Template": "templates of strangers run in lptune/data/hf_process.py",
    "jinja2.nativetypes": "it evaluates what a template writes",
    "os.system": "a shell parses its argument", "os.popen": "a shell parses its argument",
    "tempfile.mktemp": "another process can take the name first",
}  # fmt: skip
"""Dotted name, of a module or what is in it -> reason."""

METHODS = dict.fromkeys(
    (
        "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
        "send_object_list", "recv_object_list",
    ),
    "collectives of objects pickle; tensors and JSON bytes are sent",
)  # fmt: skip
"""Names that are banned on any receiver."""

ARGUMENTS = {
    "shell": "a shell parses the command",
    "trust_remote_code": "it runs Python that came with a data set or model",
    "allow_pickle": UNPICKLES,
    "weights_only": "only torch.load has it",
}
"""Keyword arguments that are banned but for the value False."""

ALLOWED = {
    ("lptune/training/trackers.py", "importlib.import_module"): "trackers by name, from a constant table",
    (
        "lptune/models/__init__.py",
        "importlib.import_module",
    ): "its own modules by name, from a constant table",
    (
        "lptune/cli/tools.py",
        "importlib.import_module",
    ): "modules of lptune/tools, found by listing the folder",
    (
        "lptune/cli/recipe.py",
        "importlib.util.spec_from_file_location",
    ): "the recipe that the user asked to run",
}
"""(file, name) -> why it may."""

BUILTINS = frozenset(dir(builtins))


def uses(source: str, file: str = "") -> Iterator[tuple[int, str, str]]:
    """(line, name, reason) of each banned use."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    aliases[alias.asname] = alias.name
                yield from _banned(alias.name, node.lineno, file)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from _banned(f"{node.module}.{alias.name}", node.lineno, file)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in BUILTINS and id(node) not in called:
            continue  # a field or a parameter may be named compile
        if isinstance(node, (ast.Name, ast.Attribute)):
            first, _, rest = _dotted(node).partition(".")
            full = ".".join(part for part in (aliases.get(first, first), rest) if part)
            yield from _banned(full, node.lineno, file)
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in ARGUMENTS and not is_false:
                    yield node.lineno, keyword.arg, ARGUMENTS[keyword.arg]


def _banned(name: str, line: int, file: str) -> Iterator[tuple[int, str, str]]:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        prefix = ".".join(parts[:end])
        if prefix in BANNED and (file, prefix) not in ALLOWED:
            yield line, prefix, BANNED[prefix]
    if parts[-1] in METHODS:
        yield line, parts[-1], METHODS[parts[-1]]


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
