"""Requirements: missing modules, and imported modules that are not declared."""

from __future__ import annotations

import pytest

from paceline.bundle.imports import check_requirements, undeclared
from paceline.errors import Unreadable


def test_missing_modules_are_named() -> None:
    check_requirements(["json", "os.path", "numpy"])
    with pytest.raises(Unreadable, match=r"'no_such_module', 'json\.no_such_part', which this worker does not have"):
        check_requirements(["json", "no_such_module", "json.no_such_part"])


def test_dependencies_of_paceline_need_no_requirement() -> None:
    assert undeclared(["numpy", "sympy", "yaml", "no_such_module", "named"], ["named.part"]) == ["no_such_module"]
