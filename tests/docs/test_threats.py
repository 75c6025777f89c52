"""docs/threats.md: every row names tests, and every test that it names exists."""

import ast
import functools
import re
from pathlib import Path
from typing import Final

ROOT: Final = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
PAGE: Final = ROOT / "docs" / "threats.md"
TEST: Final = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[tuple[int, list[tuple[str, str]]]]:
    """(number, [(file, test)]) of each row of the tables."""
    found = re.findall(r"^\| (\d+) \|.*\|([^|]*)\|$", PAGE.read_text(), re.MULTILINE)
    return [(int(number), TEST.findall(tests)) for number, tests in found]


@functools.cache
def functions_of(file: str) -> set[str]:
    """The names of the test functions of a file."""
    tree = ast.parse((ROOT / file).read_text())
    functions = (node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return {node.name for node in functions if node.name.startswith("test_")}


def test_rows_are_numbered_without_a_gap_and_each_names_a_test() -> None:
    numbers = [number for number, _ in rows()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 37
    assert [number for number, tests in rows() if not tests] == []


def test_every_test_that_is_named_exists() -> None:
    missing = [
        f"{number}: {file}::{name}"
        for number, tests in rows()
        for file, name in tests
        if not (ROOT / file).is_file() or name not in functions_of(file)
    ]
    assert not missing


def test_nothing_that_looks_like_a_test_is_overlooked() -> None:
    """A name with a typing error in its form would not be checked at all."""
    text = PAGE.read_text()
    assert len(re.findall(r"::test_", text)) == len(TEST.findall(text))
