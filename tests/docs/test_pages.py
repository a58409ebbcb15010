"""What pages say of the code: error lines, protocols, kinds; and that their links lead somewhere."""

import ast
import re
from pathlib import Path

import yaml

from lptune.config import PRECISION_KINDS, FinetuneConfig, key_paths
from lptune.hardware import devices
from lptune.linear import Kind
from tests.helpers.docs_pages import EVERY_PAGE, PAGES, ROOT, Block, anchors, blocks, links, prose
from tests.helpers.each import holds_for_each

DOCS = ROOT / "docs"
VALUE = "…"


def message_templates() -> list[str]:
    """Every text of the library that could be a message, with `…` for each value in it."""
    found = []
    for path in (ROOT / "lptune").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (each.value if isinstance(each, ast.Constant) else VALUE for each in node.values)
                found.append("".join(str(part) for part in parts))
    return [" ".join(text.split()) for text in found]


def quoted_lines() -> list[str]:
    """The first cells of the tables of troubleshooting.md, but for the lines of others."""
    ours, _, _ = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").partition("\n## Lines of others\n")
    cells = re.findall(r"^\| (`.+?) \| ", ours, re.MULTILINE)
    return [re.sub(r"^(`+) ?(.*?) ?\1$", r"\2", cell) for cell in cells]


def test_every_error_line_that_the_page_explains_is_in_the_code() -> None:
    templates = message_templates()
    lines = quoted_lines()
    assert len(lines) > 45
    missing = []
    for line in lines:
        fragments = [each.strip() for each in line.split(VALUE) if each.strip(" :`")]
        pattern = re.compile(".*".join(re.escape(each) for each in fragments))
        if not any(pattern.search(text) for text in templates):
            missing.append(line)
    assert not missing, missing


def test_every_name_of_the_code_on_the_page_about_extending_exists() -> None:
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:lptune|recipes|tests)/[\w/.]+)`", text))
    assert len(paths) > 15
    assert not [path for path in paths if not (ROOT / path).exists()]
    sources = "".join((ROOT / path).read_text() for path in sorted(paths) if path.endswith(".py"))
    kernels = "".join(path.read_text() for path in (ROOT / "lptune/config").glob("*.py"))
    for name in re.findall(r"`@?([A-Za-z_]{3,})`", text):
        assert re.search(rf"\b{name}\b", sources + kernels), name


def test_the_page_about_extending_lists_what_a_kind_must_have() -> None:
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    _, _, rest = text.partition("\n## A kind of precision\n")
    section = rest.partition("\n## ")[0]
    for name in Kind.__abstractmethods__:
        assert f"`{name}`" in section, name
    unset = {name for name in Kind.__annotations__ if not hasattr(Kind, name)}
    assert unset == {"name", "fmt", "operations"}
    assert all(f"`{name}`" in section for name in unset)


def test_the_page_about_precision_names_every_kind_and_every_generation_of_gpus() -> None:
    text = (DOCS / "choose_precision.md").read_text(encoding="utf-8")
    assert not [kind for kind in PRECISION_KINDS if f"`{kind}`" not in text]
    assert {device.capability[0] for device in devices.DEVICES} <= {8, 9, 10, 12}
    assert not [name for name in ("Ampere", "Ada", "Hopper", "Blackwell") if name not in text]


def test_the_menu_of_the_site_has_every_page_once() -> None:
    source = (DOCS / "site" / "build.py").read_text(encoding="utf-8")
    (menu,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MENU"
    ]
    names = [name for page_names in menu.values() for name in page_names]
    assert len(names) == len(set(names))
    missing = {path.stem for path in DOCS.glob("*.md")} - {"README"} - set(names)
    assert not missing, f"put them into MENU of docs/site/build.py: {missing}"


def wrong_links(page: Path) -> list[str]:
    wrong = []
    for path, anchor in links(page):
        target = page.parent / path if path else page
        if not target.exists():
            wrong.append(f"{page.name}: {path}: there is no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            wrong.append(f"{page.name}: {path}#{anchor}: there is no such heading")
    return wrong


def test_every_link_leads_to_a_page_and_to_a_heading_of_it() -> None:
    wrong = [line for page in EVERY_PAGE for line in wrong_links(page)]
    assert not wrong, "\n".join(wrong)


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n[1](page.md) [2](#a-title) [3](no.md) [4](page.md#b) [5](no.md 'x')\n")
    assert [line.split(": ")[1] for line in wrong_links(page)] == ["no.md", "page.md#b", "no.md"]


def check_keys(block: Block) -> None:
    """The keys of a block of YAML are some of a fine-tuning config."""
    known, content = set(key_paths(FinetuneConfig)), yaml.safe_load(block.text)
    if "task" in content:  # of lm_eval
        return
    for section, value in content.items():
        names = [f"{section}.{key}" for key in value] if isinstance(value, dict) else [section]
        unknown = set(names) - known
        assert not unknown


def test_the_yaml_of_every_page_has_keys_that_exist() -> None:
    shown = [block for page in PAGES for block in blocks(page, "yaml")]
    holds_for_each(shown, check_keys, name=lambda block: block.place)


def test_a_table_row_has_as_many_cells_as_its_header() -> None:
    """A `|` within code ends a cell on GitHub, and an unpaired backtick swallows one."""
    wrong = []
    for page in PAGES:
        width = 0
        for number, line in enumerate(prose(page).splitlines(), 1):
            if not line.startswith("|"):
                width = 0
                continue
            cells = len(re.findall(r"(?<!\\)\|", line)) - 1
            width = width or cells
            if cells != width:
                wrong.append(f"{page.name}:{number}: {cells} cells under a header of {width}")
    assert not wrong, wrong
