"""Facts about models that every role must know alike."""

from __future__ import annotations

import pytest

from paceline.models import resolved_dtype


@pytest.mark.parametrize(
    ("precision", "device_type", "expected"),
    [
        ("auto", "cuda", "bfloat16"),
        ("auto", "cpu", "float32"),
        ("float32", "cuda", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
    ],
)
def test_auto_depends_on_the_device_and_a_named_precision_does_not(
    precision: str, device_type: str, expected: str
) -> None:
    assert resolved_dtype(precision, device_type) == expected
