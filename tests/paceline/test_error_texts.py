"""Exceptions of foreign code in one line."""

from __future__ import annotations

import pytest

from paceline.errors import counted, error_text, is_about_input


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (ValueError("error \n second line"), "ValueError: error …"),
        (ValueError("\n\n first"), "ValueError: first"),
        (KeyError("answer"), "KeyError: 'answer'"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_the_type_and_the_first_line_stay(error: Exception, text: str) -> None:
    assert error_text(error) == text


def test_a_panic_in_rust_is_about_the_input_and_an_interrupt_is_not() -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    assert is_about_input(panic("index out of bounds"))
    assert is_about_input(KeyError("a"))
    assert not is_about_input(KeyboardInterrupt())
    assert not is_about_input(MemoryError())


def test_a_noun_agrees_with_its_number() -> None:
    assert [counted(number, "group") for number in (0, 1, 2.0, 2000)] == [
        "0 groups",
        "1 group",
        "2 groups",
        "2,000 groups",
    ]
