"""Names in the package: one class per name, and no two that only differ in the order of their words."""

import ast
import re
from collections import defaultdict

from tests.kit.repository import ROOT

PACKAGE = ROOT / "diloco_node"


def class_names() -> dict[str, list[str]]:
    """Class name -> the files that define it, private classes included."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    return found


def words_of(name: str) -> tuple[str, ...]:
    return tuple(sorted(re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", name)))


def test_no_class_name_exists_twice() -> None:
    twice = {name: files for name, files in class_names().items() if len(files) > 1}
    assert not twice


def test_no_two_class_names_differ_in_word_order_only() -> None:
    by_words: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for name in class_names():
        by_words[words_of(name)].add(name)
    assert not [names for names in by_words.values() if len(names) > 1]


def test_modules_stay_under_500_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (lines := len(path.read_text().splitlines())) > 500
    }
    assert not long
