"""The retry hint of a refusal travels as text; malformed hints are ignored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.calls.backoff import KEY, MAX_S, from_error, to_header, to_metadata
from paceline.errors import USUAL_S, Busy


def error(*trailing: tuple[str, Any]) -> Any:
    return SimpleNamespace(trailing_metadata=lambda: trailing)


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0"), (0.25, "250"), (1.0001, "1001"), (1e9, "3600000")])
def test_the_hint_is_in_milliseconds(seconds: float, text: str) -> None:
    assert to_metadata(seconds) == ((KEY, text),)
    assert from_error(error(*to_metadata(seconds))) == int(text) / 1000


def test_the_header_is_in_whole_seconds() -> None:
    assert [to_header(s)["Retry-After"] for s in (0.0, 0.2, 1.0, 1.5, 1e9)] == ["1", "1", "1", "2", "3600"]


def test_a_malformed_hint_is_ignored() -> None:
    for value in ("", "x", "-5", "1.5", "9" * 40, "²"):
        assert from_error(error((KEY, value))) is None
    assert from_error(error(("other", "5"))) is None
    assert from_error(SimpleNamespace(trailing_metadata=lambda: None)) is None
    assert from_error(object()) is None
    assert from_error(error((KEY, "999999999"))) == MAX_S


def test_a_busy_error_has_a_hint() -> None:
    assert Busy("full").retry_after_s == USUAL_S
    assert Busy("full", 60.0).retry_after_s == 60.0
