"""The documentation's tables name what the code knows, no more and no less."""

import re
from pathlib import Path

from lptune import models
from lptune.cli import catalog
from lptune.config import PRECISION_KINDS, SUFFIXES, FinetuneConfig, key_paths
from lptune.data import formats
from lptune.models.attention import BACKENDS
from lptune.models.families import FAMILIES
from lptune.models.presets import preset_names
from tests.helpers import hf_types
from tests.helpers.each import holds_for_each

DOCS = Path(__file__).parents[1] / "docs"
NO_KEYS = {
    "data.md",
    "model.safetensors",
    "model.embed_tokens",
    "export.json",
    "export.md",
    "precision.py",
}  # files and tensors
PAGES = [
    DOCS.parent / "README.md",
    *(
        DOCS / name
        for name in (
            "data.md",
            "models.md",
            "resume.md",
            "multi_node.md",
            "linear.md",
            "numerics.md",
            "pretraining.md",
        )
    ),
]


def table(page: str, header: str) -> list[list[str]]:
    """The cells of the table whose header row begins with `header`."""
    _, _, rest = (DOCS / page).read_text(encoding="utf-8").partition(f"\n| {header}")
    assert rest, header
    rows = rest.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def quoted(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", text))


def test_the_table_of_column_names_is_that_of_the_code() -> None:
    found = [quoted(names) for _, _, names, _ in table("data.md", "Format | Column")]
    assert found == [
        formats.PROMPT_NAMES,
        formats.INPUT_NAMES,
        formats.RESPONSE_NAMES,
        formats.MESSAGES_NAMES,
        formats.TOOLS_NAMES,
        formats.TEXT_NAMES,
        formats.CHOSEN_NAMES,
        formats.REJECTED_NAMES,
        formats.LABEL_NAMES,
    ]


def test_every_kind_of_file_is_in_the_table_of_sources() -> None:
    named = [name for row in table("data.md", "`data.source`") for name in quoted(row[0])]
    assert {Path(name).suffix for name in named if not name.isupper()} - {""} >= set(SUFFIXES)


def test_the_tables_of_families_sizes_and_backends_are_those_of_the_code() -> None:
    assert {row[0].strip("`") for row in table("models.md", "`model_type`")} == set(FAMILIES)
    sizes = {row[0].strip("`"): set(quoted(row[1])) for row in table("models.md", "Family | Sizes")}
    listed = {f"{family}/{size}" for family, names in sizes.items() for size in names}
    configs = {name: path for name, path in catalog.configs().items() if "/" in name}
    full = {name for name, path in configs.items() if catalog.recipe_of(path) == "full_finetune"}
    for_one_gpu = {name for name in full if re.search(r"_\d+gb$", name)}
    assert listed == full - for_one_gpu
    page = (DOCS / "models.md").read_text()
    assert [name for name in sorted(for_one_gpu) if f"`{name}`" not in page] == []
    assert listed <= set(preset_names())
    assert {row[0].strip("`") for row in table("models.md", "Backend")} == set(BACKENDS)


def test_the_table_of_objectives_is_that_of_the_code() -> None:
    named = re.findall(r"`models\.(\w+)", "\n".join(row[0] for row in table("models.md", "`loss=`")))
    ours = set(models._LAZY["loss"])
    assert set(named) == ours - {"IGNORE_INDEX", "Objective"}
    assert len(named) == len(set(named))


def test_the_readme_names_every_kind_of_precision() -> None:
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert rows == [kind for kind in PRECISION_KINDS if kind != "none"]


def test_the_numerics_page_explains_and_measures_every_kind() -> None:
    kinds = [kind for kind in PRECISION_KINDS if kind != "none"]
    assert [row[0].strip("`") for row in table("numerics.md", "Kind |")] == kinds
    assert [row[0].strip("| ") for row in table("numerics.md", "kind | modes")] == ["bf16", *kinds]


def test_the_matrix_names_every_kind_and_has_no_hole() -> None:
    rows = table("matrix.md", "kind | compile")
    named = [kind for row in rows for kind in quoted(row[0])]
    assert sorted(named) == sorted(kind for kind in PRECISION_KINDS if kind != "none")
    cells = [cell.strip("| ") for row in rows for cell in row[2:]]
    assert all(re.fullmatch(r"\d+( \(\d+\))?", cell) for cell in cells), cells


def test_the_matrix_of_ranks_names_every_kind_and_has_no_hole() -> None:
    rows = table("rank_matrix.md", "kind | 8-bit")
    assert sorted(kind for row in rows for kind in quoted(row[0])) == sorted(PRECISION_KINDS)
    cells = [cell.strip("| ") for row in rows for cell in row[2:]]
    assert all(re.fullmatch(r"\d+ / \d+ / \d+", cell) for cell in cells), cells


def test_the_table_of_types_has_every_type_and_no_hole() -> None:
    rows = table("models.md", "Type | built by")
    assert [row[0].strip("| `") for row in rows] == sorted(hf_types.ALL)
    number = r"\d+( of \d+)?|\de[+-]\d\d|cache|whole rows"
    cells = [cell.strip("| ") for row in rows for cell in row[2:]]
    assert all(re.fullmatch(number, cell) for cell in cells), cells
    native = {row[0].strip("| `") for row in rows if row[1].strip("| ") == "lptune"}
    assert native == set(FAMILIES)


def test_the_example_of_the_linear_layer_runs() -> None:
    # The other is what tests/distributed/test_accelerate.py does.
    code, *_ = re.findall(r"```python\n(.*?)```", (DOCS / "linear.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, "docs/linear.md", "exec"), {})  # an error is the failure; it verifies itself


def check_keys(page: Path) -> None:
    """What has the form of a key, SECTION.NAME, is one."""
    known = set(key_paths(FinetuneConfig))
    sections = {key.partition(".")[0] for key in known if "." in key}
    pattern = rf"(?<![\w/.])((?:{'|'.join(sorted(sections))})\.[a-z_]+)\b(?!\.)"
    prose = re.sub(r"```python\n.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    unknown = set(re.findall(pattern, prose)) - NO_KEYS - known
    assert not unknown


def test_every_key_that_a_page_names_exists() -> None:
    holds_for_each(PAGES, check_keys, name=lambda page: page.name)


def test_the_log_is_newest_first_with_a_verdict_in_each_title_and_short_entries() -> None:
    entries = re.split(r"^## ", (DOCS / "log.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    dated = [entry for entry in entries if re.match(r"\d{4}-\d\d-\d\d · \S", entry)]
    assert all(entry.startswith("Decisions") for entry in entries[len(dated) :])  # undated, at the end
    dates = [entry[:10] for entry in dated]
    assert len(dates) > 80
    assert dates == sorted(dates, reverse=True)
    for entry in entries:
        lines = entry.rstrip().splitlines()
        assert len(lines) <= 12, lines[0]
        assert max(map(len, lines)) <= 200, lines[0]
        assert not any(line.startswith("|") for line in lines), f"{lines[0]}: tables stand in benchmarks.md"
        assert not re.search(r"^(<{7}|={7}|>{7})", entry, flags=re.MULTILINE), f"{lines[0]}: a merge's mark"


def test_every_table_that_the_log_refers_to_stands_in_the_benchmarks() -> None:
    log = (DOCS / "log.md").read_text(encoding="utf-8")
    _, _, tables = (DOCS / "benchmarks.md").read_text(encoding="utf-8").partition("\n## Tables of the log\n")
    named = re.findall(r'benchmarks\.md[^"\n]{0,12}"([^"]+)"', log)
    titles = re.findall(r"^### (.+)$", tables, re.MULTILINE)
    assert set(named) == set(titles)


def test_the_glossary_defines_each_word_once_and_the_index_lists_every_page() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    words = [word for row in rows for word in row.split(", ") if row not in ("Write", "Word", "---")]
    assert len(words) > 60
    assert sorted(set(words)) == sorted(words)
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\(([\w-]+\.md)\)", index))
