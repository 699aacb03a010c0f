"""A class of the coordinator has few fields: one with many is several things."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline.services.coordinator

MAX_FIELDS = 15


def fields_of(of_class: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return the attributes that methods assign on `self`. For a dataclass, add its fields and its bases' fields."""
    assigned = {
        node.attr
        for node in ast.walk(of_class)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in of_class.decorator_list)
    annotated = (node for node in of_class.body if is_dataclass and isinstance(node, ast.AnnAssign))
    fields = assigned | {
        ast.unparse(node.target) for node in annotated if "ClassVar" not in ast.unparse(node.annotation)
    }
    bases = [classes[name] for base in of_class.bases if is_dataclass and (name := ast.unparse(base)) in classes]
    return fields.union(*(fields_of(base, classes) for base in bases))


def classes_of_coordinator() -> dict[str, ast.ClassDef]:
    """Return the classes by name; names that begin with an underscore are followed by their file's path."""
    folder = Path(paceline.services.coordinator.__path__[0])
    return {
        node.name + (str(path) if node.name.startswith("_") else ""): node
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }


def test_fields_are_counted() -> None:
    source = "@dataclass\nclass A:\n    b: int = 0\n    def __init__(self):\n        self.c, self.d = 1, 2\n        self.c += 1\n"
    first, second = ast.parse(source + "@dataclass\nclass E(A):\n    f: int\n").body
    assert isinstance(first, ast.ClassDef)
    assert isinstance(second, ast.ClassDef)
    assert fields_of(first, {}) == {"b", "c", "d"}
    assert fields_of(second, {"A": first}) == {"b", "c", "d", "f"}


def test_no_class_has_more_than_fifteen_fields() -> None:
    classes = classes_of_coordinator()
    assert "PendingRequest" in classes
    counted = {name: fields_of(node, classes) for name, node in classes.items()}
    assert {name: sorted(fields) for name, fields in counted.items() if len(fields) > MAX_FIELDS} == {}
