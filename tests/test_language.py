"""The language of the package: variables are nouns, docstrings begin with a noun or an imperative."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.repository import ROOT

PACKAGE = ROOT / "diloco_node"

PER_THOUSAND_LINES = 5.0
"""Pronouns and participles as names, at most; distributed has 2.0, trio 0.4, websockets 0.0."""

PRONOUN_WORDS = """
    one ones other others rest both it this that these those some each every who what which whom whose mine theirs part
    parts
"""
PARTICIPLE_WORDS = """
    begun brought chosen come done drawn found given gone got grown heard held kept known left lost made meant said seen
    sent shown spoken struck taken thrown told written
"""
NO_NOUNS = frozenset(f"{PRONOUN_WORDS} {PARTICIPLE_WORDS}".split())
NOUNS_IN_ED = frozenset({"bed", "embed", "feed", "need", "seed", "sorted", "reversed", "speed"})
"""Words that only look like participles, and Python's own."""

CLAUSES = frozenset({"What", "Who", "Of", "Whose", "Whom", "Which"})
"""First words of a clause that stands where a noun should. "See the module" names nothing in an editor or `help()`."""

ATTRIBUTES_WITHOUT_INVARIANT = 15
GROUP_MAX = 4
"""Attributes that one comment may head."""


def modules() -> Iterator[tuple[Path, str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        yield path.relative_to(PACKAGE), text, ast.parse(text)


def room_of(path: Path) -> str:
    """The room of a file: its folder, without sub-rooms except those of core and lab."""
    folders = path.parts[:-1]
    return "/".join(folders[:2] if folders[:1] in (("core",), ("lab",)) else folders[:1]) or "."


def is_no_noun(name: str) -> bool:
    if name.startswith("__"):
        return False
    word = name.strip("_")
    if word in NO_NOUNS:
        return True
    return re.fullmatch("[a-z]+ed", word) is not None and word not in NOUNS_IN_ED


def variables(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def test_the_count_sees_pronouns_and_participles_and_no_nouns() -> None:
    tree = ast.parse("def read(found, *, seed):\n    one = asked = found\n    return sorted(one + seed)\n")
    assert Counter(filter(is_no_noun, variables(tree))) == {"found": 2, "one": 2, "asked": 1}


def test_variables_are_nouns_in_every_room() -> None:
    lines: Counter[str] = Counter()
    names: dict[str, Counter[str]] = defaultdict(Counter)
    for path, text, tree in modules():
        lines[room_of(path)] += text.count("\n")
        names[room_of(path)].update(filter(is_no_noun, variables(tree)))
    rates = {room: 1000 * names[room].total() / max(1, lines[room]) for room in lines}
    worst = {room: names[room].most_common(8) for room, rate in rates.items() if rate > PER_THOUSAND_LINES}
    assert not worst, {room: f"{rates[room]:.1f} per thousand lines" for room in worst}


def sentences(tree: ast.Module) -> Iterator[str]:
    """Sentences of all docstrings, those of attributes too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from filter(None, map(str.strip, re.split(r"(?<=[.:!?])\s+|\n\s*\n", node.value.value)))


def test_no_sentence_of_a_docstring_begins_with_a_clause() -> None:
    clauses = [
        f"{path}: {sentence[:80]}"
        for path, _, tree in modules()
        for sentence in sentences(tree)
        if sentence.startswith("See the module")
        or (sentence.split()[0].strip("`\"'(") in CLAUSES and not sentence.endswith("?"))
    ]
    assert not clauses


def test_no_file_name_stands_in_two_rooms() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, _, _ in modules():
        if not path.stem.startswith("__"):
            places[path.name].append(str(path))
    assert not [paths for paths in places.values() if len(paths) > 1]
    assert "command.py" not in places


def objects_without_invariants() -> Iterator[str]:
    """Attributes of large objects without a comment above them or above their group."""
    for path, text, tree in modules():
        lines = text.split("\n")
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    words = re.findall(r"\w+(?=[,:])", ast.get_docstring(node) or "")
                    bare = (name for name in bare_attributes(method, lines) if name not in words)
                    yield from (f"{path}: {node.name}.{name}" for name in bare)


def bare_attributes(method: ast.FunctionDef, lines: list[str]) -> list[str]:
    """Attributes that `__init__` sets without a comment above them, if it sets many."""
    attributes: dict[str, int] = {}
    plain: set[str] = set()
    for statement in ast.walk(method):
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                attributes.setdefault(target.attr, statement.lineno)
                if is_said_elsewhere(target.attr, statement.value):
                    plain.add(target.attr)
    if len(attributes) <= ATTRIBUTES_WITHOUT_INVARIANT:
        return []
    return [name for name, line in attributes.items() if name not in plain and not has_comment(lines, line)]


def is_said_elsewhere(name: str, value: ast.expr | None) -> bool:
    """Whether a docstring has it: that of the class for an argument, that of its own class for a collaborator."""
    if isinstance(value, ast.Name):
        return value.id == name.strip("_")
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id[:1].isupper()


def has_comment(lines: list[str], line: int) -> bool:
    """Whether a comment heads the few assignments among which this one stands; `line` counts from 1."""
    above = lines[max(0, line - 1 - GROUP_MAX) : line - 1]
    for text in reversed(above):
        if text.strip().startswith("#"):
            return True
        if not text.strip().startswith("self."):
            return False
    return False


def test_attributes_of_large_objects_carry_their_invariant() -> None:
    assert not list(objects_without_invariants())


@pytest.mark.parametrize("count", [ATTRIBUTES_WITHOUT_INVARIANT, ATTRIBUTES_WITHOUT_INVARIANT + 1])
def test_an_object_is_large_by_its_attributes(count: int) -> None:
    body = "".join(f"    self.a{number} = {number}\n" for number in range(count))
    source = f"def __init__(self):\n{body}"
    method = ast.parse(source).body[0]
    assert isinstance(method, ast.FunctionDef)
    assert bool(bare_attributes(method, source.split("\n"))) == (count > ATTRIBUTES_WITHOUT_INVARIANT)
