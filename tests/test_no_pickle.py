"""Nothing in the package can run code that came as data: no pickle is read, and torch.load is not used."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import diloco_node

PACKAGE = Path(diloco_node.__file__).parent
READERS = {
    "pickle": {"load", "loads", "Unpickler"},
    "_pickle": {"load", "loads", "Unpickler"},
    "cloudpickle": {"load", "loads"},
    "dill": {"load", "loads"},
    "joblib": {"load"},
    "torch": {"load"},
    "torch.serialization": {"load"},
    "marshal": {"load", "loads"},
    "numpy": {"load"},
    "shelve": {"open"},
    "yaml": {"load", "unsafe_load"},
}


def readers(source: str) -> Iterator[tuple[int, str]]:
    """(line, reader) of each use, under whatever name it was imported."""
    nodes = list(ast.walk(ast.parse(source)))
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                names[one.asname or one.name.partition(".")[0]] = one.name if one.asname else one.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                names[one.asname or one.name] = f"{node.module}.{one.name}"
                if one.name in READERS.get(node.module, ()):
                    yield node.lineno, f"{node.module}.{one.name}"
    for node in nodes:
        if isinstance(node, ast.Attribute):
            module = ".".join(reversed(list(_dotted(node.value, names))))
            if node.attr in READERS.get(module, ()):
                yield node.lineno, f"{module}.{node.attr}"


def _dotted(node: ast.expr, names: dict[str, str]) -> Iterator[str]:
    """The words of `a.b.c` from the last one, with the first as it was imported."""
    while isinstance(node, ast.Attribute):
        yield node.attr
        node = node.value
    if isinstance(node, ast.Name):
        yield names.get(node.id, node.id)


def test_no_module_reads_a_format_that_can_hold_code() -> None:
    sources = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {reader}"
        for path, source in sources.items()
        if any(module in source for module in READERS)  # who does not name it can't have imported it
        for line, reader in readers(source)
    ]
    assert not found


@pytest.mark.parametrize(
    ("source", "reader"),
    [
        ("import pickle\npickle.loads(x)", "pickle.loads"),
        ("import pickle as p\np.load(x)", "pickle.load"),
        ("from pickle import loads", "pickle.loads"),
        ("from pickle import Unpickler as U", "pickle.Unpickler"),
        ("def f():\n    import pickle as p\n    return p.Unpickler(x).load()", "pickle.Unpickler"),
        ("import torch\ntorch.load(x, weights_only=True)", "torch.load"),
        ("from torch import load", "torch.load"),
        ("import torch\ntorch.serialization.load(x)", "torch.serialization.load"),
        ("from torch import serialization as s\ns.load(x)", "torch.serialization.load"),
        ("import numpy as anything\nanything.load(x)", "numpy.load"),
    ],
)
def test_a_reader_is_found_under_whatever_name(source: str, reader: str) -> None:
    assert [found for _, found in readers(source)] == [reader]
