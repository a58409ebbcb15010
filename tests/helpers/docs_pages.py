"""What the documentation says in code: fenced blocks, commands, and the anchors of its headings."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The log and the changelog tell what was done on a day, with the commands of that day.
PAGES = sorted(
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
    if path.name != "log.md"
)
EVERY_PAGE = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "docs" / "log.md"]
COMMANDS = (
    "bash", "curl", "docker", "hf", "lptune", "make", "pip", "pytest", "python", "python3", "rm", "sbatch",
    "torchrun", "vllm",
)  # fmt: skip
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language ("" without one), its lines without the indentation."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One simple command: no pipe, no redirection, no variables before it."""

    place: str
    words: tuple[str, ...]
    inline: bool
    """Whether it stands in a sentence, where it may be the name of a command alone, or have placeholders."""

    @property
    def name(self) -> str:
        return self.words[0].removeprefix(".venv/bin/")

    def __str__(self) -> str:
        return shlex.join(self.words)


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    """The fenced blocks of `page` in one of `languages`, or in any."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        if not languages or found["language"] in languages:
            lines = (line.removeprefix(found["indent"]) for line in found["text"].splitlines(keepends=True))
            yield Block(page, text.count("\n", 0, found.start()) + 1, found["language"], "".join(lines))


def prose(page: Path) -> str:
    """The page without its fenced blocks, with as many lines."""
    text = page.read_text(encoding="utf-8")
    return _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)


def simple_commands(line: str) -> Iterator[tuple[str, ...]]:
    """The simple commands of a shell line: cut at `|`, `&&` and `;`, without `> FILE` and `NAME=value`."""
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), ";"]:
        if word in ("|", "&&", ";"):
            cut = next((i for i, each in enumerate(words) if re.fullmatch(r"\d?[<>]{1,2}(&-)?", each)), None)
            words = words[:cut]
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words:
                yield tuple(words)
            words = []
        else:
            words.append(word)


def commands(page: Path) -> Iterator[Command]:
    """All commands of a page: every line of a bash block, known commands elsewhere."""
    for block in blocks(page, "", "bash", "sh", "console"):
        joined = re.sub(r"\\\n\s*", " ", block.text)
        for line in joined.splitlines():
            line = line.strip().removeprefix("$ ")
            first = (line.split() or [""])[0].removeprefix(".venv/bin/")
            if line.startswith("#") or (
                (not block.language or block.language == "console") and first not in COMMANDS
            ):
                continue
            for words in simple_commands(line):
                yield Command(block.place, words, inline=False)
    for number, line in enumerate(prose(page).splitlines(), 1):
        for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", line):
            first, _, rest = code.partition(" ")
            if first in COMMANDS and rest:
                for words in simple_commands(code):
                    yield Command(f"{page.name}:{number}", words, inline=True)


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


def links(page: Path) -> Iterator[tuple[str, str]]:
    """(path, anchor) of each link that is no URL; path is "" for one within the page."""
    for path, anchor in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]+))?(?: [^)]*)?\)", prose(page)):
        if not re.match(r"[a-z]+:", path):
            yield path, anchor
