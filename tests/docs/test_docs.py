"""The prose: short sentences, commands that exist, links that lead somewhere, a site that fetches nothing."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from diloco_node.main import app

ROOT: Final = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
PACKAGE: Final = ROOT / "diloco_node"
PAGES: Final = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
)
WORDS_MAX: Final = 30
ALL_WORDS_MAX: Final = 35_000

_FENCE: Final = re.compile(r"^\s*(```|~~~)")
_ITEM: Final = re.compile(r"^\s*([-*+]|\d+\.)\s+")
_ADMONITION: Final = re.compile(r"^\s*(!!!|\?\?\?)")
_LINK: Final = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)")
_CODE: Final = re.compile(r"`+[^`]*`+")
_SPAN: Final = re.compile(r"`+(?:[^`\n]|\n(?!\s*\n))*`+")
_COMMENT: Final = re.compile(r"<!--.*?-->", re.DOTALL)
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])[\"')*\]]*\s+(?=[\"'(*\[]*[A-Z0-9])")
_PLACEHOLDER: Final = "Code"


def prose_and_code(text: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """(line number, line) of what is outside fenced code, and of what is inside."""
    prose, code, is_code = [], [], False
    # A comment keeps its line breaks, so that line numbers stay true.
    text = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
    for number, line in enumerate(text.splitlines(), start=1):
        if _FENCE.match(line):
            is_code = not is_code
            prose.append((number, ""))
        else:
            (code if is_code else prose).append((number, line))
    return prose, code


def blocks(prose: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """(first line, text) of each heading, paragraph, list item and table cell."""
    first, words = 0, [""]
    for number, line in [*prose, (0, "")]:
        stripped = line.strip()
        is_table = stripped.startswith("|")
        starts = bool(_ITEM.match(line)) or stripped.startswith(("#", ">")) or bool(_ADMONITION.match(line))
        if (not stripped or is_table or starts) and any(words):
            yield first, " ".join(words)
            words = [""]
        if is_table:
            for cell in stripped.strip("|").replace("\\|", "/").split("|"):
                yield number, cell
        elif stripped:
            first = first if any(words) else number
            words.append(_ITEM.sub("", line).strip().lstrip("#> "))
            if stripped.startswith("#"):
                yield first, " ".join(words)
                words = [""]


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """(line, sentence) of one page. A code span counts as one word, for it is a name; a link as its text."""
    for line, block in blocks(prose_and_code(text)[0]):
        plain = _LINK.sub(lambda found: found[1], _CODE.sub(_PLACEHOLDER, block))
        for sentence in _SENTENCE_END.split(plain):
            yield line, sentence.strip()


def word_count(sentence: str) -> int:
    """How many words; a lone dash or plus sign is none."""
    return len(re.findall(r"\S*\w\S*", sentence))


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_a_sentence_is_counted_as_a_reader_counts_it() -> None:
    text = """# A heading

One two `three four` five
[six seven](page.md). Eight 9.5 nine!

- an item
  goes on
- another item

| a cell | two. Three four |
|---|---|

```
this is code and not prose. It does not count at all
```
"""
    found = [(line, word_count(sentence)) for line, sentence in sentences(text) if word_count(sentence)]
    assert found == [(1, 2), (3, 6), (3, 3), (6, 4), (8, 2), (10, 2), (10, 1), (10, 2)]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_no_sentence_is_longer_than_thirty_words(page: Path) -> None:
    long = [
        f"{_name(page)}:{line}: {word_count(sentence)} words: {sentence}"
        for line, sentence in sentences(page.read_text())
        if word_count(sentence) > WORDS_MAX
    ]
    assert not long, "\n".join(long)


def test_all_pages_together_are_no_book() -> None:
    """Bars of tables are no words here; `wc -w` counts a tenth more."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert sum(word_count(page.read_text()) for page in pages) <= ALL_WORDS_MAX


# ---- commands --------------------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """(line, words) of each `diloco-node ...` or `benchmarks/...`, without what ends it; a code span may be broken."""
    prose, code = prose_and_code(text)
    whole = "\n".join(line for _, line in prose)
    spans = [(prose[whole[: span.start()].count("\n")][0], span[0].strip("`")) for span in _SPAN.finditer(whole)]
    joined: list[tuple[int, str]] = []
    for number, line in code:
        if joined and joined[-1][1].endswith("\\"):
            joined[-1] = (joined[-1][0], joined[-1][1][:-1] + line)
        else:
            joined.append((number, line))
    for number, line in joined + spans:
        found = re.search(r"(?:^|[\s$/])(?:diloco-node\s+(?![:=])|(?=benchmarks/\w+\.py))(\S.*)", line, re.DOTALL)
        if found is None:
            continue
        words = shlex.split(found[1], comments=True, posix=True) if "'" not in found[1] else found[1].split()
        ends = (at for at, word in enumerate(words) if word in {"--", "|", "&&", ">", "||"} or word.endswith(";"))
        yield number, words[: next(ends, len(words))]


@cache
def program() -> Any:
    """All commands. Typer may bring a click of its own, so no type of click's."""
    return typer.main.get_command(app)


def rejection_reason(words: list[str]) -> str:
    """What is wrong with a command, "" if it exists with all its flags. Nothing is run."""
    if words and words[0].startswith("benchmarks/"):
        return benchmark_rejection_reason(*words)
    command = program()
    path = ["diloco-node"]
    rest = list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "...":
            return ""
        if word not in command.commands:
            return f"{' '.join(path)} has no command {word!r}"
        command = command.commands[word]
        path.append(word)
    known = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)} | {"--help", "-h", "--debug"}
    unknown = [word for word in rest if re.match(r"--?[a-zA-Z]", word) and word.split("=")[0] not in known]
    return f"{' '.join(path)} has no flag {', '.join(unknown)}" if unknown else ""


def benchmark_rejection_reason(name: str, *words: str) -> str:
    """What is wrong with a command of a benchmark, "" if it and the benchmarks that it imports have all its flags."""
    waiting, texts = [ROOT / name], {}
    while waiting:
        if (path := waiting.pop()).exists() and path not in texts:
            texts[path] = path.read_text()
            waiting += [
                path.with_stem(stem) for stem in re.findall(r"^(?:from|import) (\w+)", texts[path], re.MULTILINE)
            ]
    flags = [word.strip("[]").split("=")[0] for word in words if word.strip("[").startswith("--")]
    unknown = [flag for flag in flags if not any(f'"{flag}"' in text for text in texts.values())]
    return f"{name} has no flag {', '.join(unknown)}" if texts and unknown else "" if texts else f"no {name}"


def test_a_command_that_does_not_exist_is_found() -> None:
    text = (
        "```\n$ sudo .venv/bin/diloco-node plan -n 5e9 --no-such \\\n  --mesh x  # why\n```\n"
        "`diloco-node fly\n--high`\n\n`python benchmarks/experts.py --seeds 2 [--no-such]`, `benchmarks/no_such.py`\n"
    )
    found = list(commands(text))
    assert found[:2] == [(2, ["plan", "-n", "5e9", "--no-such", "--mesh", "x"]), (5, ["fly", "--high"])]
    assert [rejection_reason(words) for _, words in found] == [
        "diloco-node plan has no flag --no-such",
        "diloco-node has no command 'fly'",
        "benchmarks/experts.py has no flag --no-such",
        "no benchmarks/no_such.py",
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=_name)
def test_every_command_exists(page: Path) -> None:
    """The changelog also names commands that are gone."""
    wrong = [
        f"{_name(page)}:{line}: {why}" for line, words in commands(page.read_text()) if (why := rejection_reason(words))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = [
        f"{_name(page)}: make {target}"
        for page in PAGES
        for target in re.findall(r"(?:^|`)make ([a-z][\w-]*)", page.read_text(), re.MULTILINE)
        if target not in targets
    ]
    assert not wrong, "\n".join(wrong)


# ---- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_links_outside_the_site_lead_to_files(name: str) -> None:
    """Inside docs/ mkdocs checks them, with their anchors."""
    text = (ROOT / name).read_text()
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    missing = [target for target in targets if "://" not in target and not (ROOT / target).exists()]
    assert not missing


def test_pages_that_the_code_names_exist() -> None:
    """A docstring or comment that sends a reader to docs/ sends them to a page."""
    files = [path for folder in ("diloco_node", "tests", "benchmarks", "docker") for path in (ROOT / folder).rglob("*")]
    files += [ROOT / "pyproject.toml", ROOT / "docker-compose.yml", ROOT / "Makefile", ROOT / "Dockerfile"]
    wrong = [
        f"{_name(path)}: {page}"
        for path in files
        if path.suffix in {".py", ".toml", ".yml", ""} and path.is_file()
        for page in re.findall(r"docs/(?:[\w-]+/)*[\w-]+\.md", path.read_text())
        if not (ROOT / page).exists()
    ]
    assert not wrong, "\n".join(wrong)


def test_the_architecture_page_names_what_is_there() -> None:
    """Rooms end in a slash, files in .py. They are below the package, tests below tests/. No room is left out."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:/|\.py))`", text)
    assert len(named) > 60
    missing = [name for name in named if not (ROOT if name.startswith("tests/") else PACKAGE).joinpath(name).exists()]
    assert not missing
    rooms = {f"{path.parent.relative_to(PACKAGE)}/" for path in PACKAGE.rglob("__init__.py")} - {"./"}
    assert not rooms - set(named)
    classes = set(re.findall(r"^class (\w+)", _package_text(), re.MULTILINE))
    assert not set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)[`.]", text)) - classes


def test_decisions_that_are_named_exist_once() -> None:
    heads = re.findall(r"^### (D-\w+)", (ROOT / "docs" / "decisions.md").read_text(), re.MULTILINE)
    assert len(heads) > 90
    assert len(heads) == len(set(heads))
    text = _package_text() + "".join(page.read_text() for page in PAGES)
    assert not set(re.findall(r"\bD-[A-Z]?\d+\b", text)) - set(heads)


def _package_text() -> str:
    return "".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))


# ---- the site --------------------------------------------------------------------------------------------------------


class Loaded(HTMLParser):
    """What a browser would load by itself for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in {"script", "img", "iframe", "source"}:
            self.found.append(values.get("src") or "")
        elif tag == "link" and values.get("rel") != "canonical":
            self.found.append(values.get("href") or "")


def test_the_site_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert pages
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text())
        assert not [url for url in loaded.found if "//" in url], page
