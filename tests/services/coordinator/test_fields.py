"""A class of the coordinator has few fields: one with many is several things."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import paceline.services.coordinator

MAX_FIELDS = 15


def fields_of(of_class: ast.ClassDef) -> set[str]:
    """Return the attributes that methods assign on `self`, and the fields of a dataclass."""
    assigned = {
        node.attr
        for node in ast.walk(of_class)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in of_class.decorator_list)
    annotated = (node for node in of_class.body if is_dataclass and isinstance(node, ast.AnnAssign))
    return assigned | {ast.unparse(node.target) for node in annotated if "ClassVar" not in ast.unparse(node.annotation)}


def classes() -> Iterator[tuple[str, set[str]]]:
    for path in sorted(Path(paceline.services.coordinator.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield node.name, fields_of(node)


def test_fields_are_counted() -> None:
    source = "@dataclass\nclass A:\n    b: int = 0\n    def __init__(self):\n        self.c, self.d = 1, 2\n        self.c += 1\n"
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    assert fields_of(node) == {"b", "c", "d"}


def test_no_class_has_more_than_fifteen_fields() -> None:
    assert {name: sorted(fields) for name, fields in classes() if len(fields) > MAX_FIELDS} == {}
