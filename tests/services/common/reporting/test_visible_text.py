"""Hostile text on a terminal."""

import pytest

from paceline.services.common.reporting.terminal import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines\tand a tab, ümläut, 漢字, 🙂", "two\nlines\tand a tab, ümläut, 漢字, 🙂"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("safe\u202eexe.png", "safe\\u202eexe.png"),
        ("\x9b31m\r\x00", "\\x9b31m\\r\\x00"),
        ("\ud800", "\\ud800"),
        ("a" * 1_000_000, "a" * 1_000_000),
    ],
)
def test_controls_are_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown
