"""Facts about models on which all roles must agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import InvalidInput, Unreadable
from paceline.models.loading import fault_of_load, resolved_dtype


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


@pytest.mark.parametrize(
    ("name", "error", "kind"),
    [
        ("local", KeyError("added_tokens"), InvalidInput),
        ("local", ValueError("no such type"), InvalidInput),
        ("local", RuntimeError("size mismatch for lm_head"), InvalidInput),
        ("local", OSError("Input/output error"), Unreadable),
        ("hub/name", ValueError("no such type"), InvalidInput),
        ("hub/name", KeyError("a hub's answer"), Unreadable),
        ("local", RuntimeError("CUDA error: out of memory"), None),
        ("local", MemoryError(), None),
        ("local", KeyboardInterrupt(), None),
    ],
)
def test_only_faults_of_the_files_are_errors_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException, kind: type | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    fault = fault_of_load("policy.model_name", name, error)
    assert (type(fault) if fault else None) is kind
    if fault:
        assert str(fault).startswith(f"policy.model_name {name!r} cannot be loaded: {type(error).__name__}: ")


def test_a_fault_that_is_named_already_stays() -> None:
    fault = InvalidInput("policy.model_name 'm': its head is not a plain matrix")
    assert fault_of_load("policy.model_name", "m", fault) is fault
