"""Nothing in the package can run code that came as data: no pickle is read, and torch.load is not used."""

from __future__ import annotations

import ast
from pathlib import Path

import diloco_node

PACKAGE = Path(diloco_node.__file__).parent
READERS = {
    "pickle": {"load", "loads", "Unpickler"},
    "torch": {"load"},
    "marshal": {"load", "loads"},
    "np": {"load"},
    "numpy": {"load"},
    "shelve": {"open"},
    "yaml": {"load", "unsafe_load"},
}


def test_no_module_reads_a_format_that_can_hold_code() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name, attribute = node.value.id, node.attr
                if attribute in READERS.get(name, ()):
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {name}.{attribute}")
    assert not found
