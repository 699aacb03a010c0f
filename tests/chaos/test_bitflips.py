"""Of a ledger's single-bit flips verify finds those that matter; the long form is `python tests/chaos/bitflips.py`."""

from __future__ import annotations

from pathlib import Path

from bitflips import count_flips


def test_flipped_bits_of_a_ledger_are_found(tmp_path: Path) -> None:
    counts = count_flips(tmp_path, flips=16, seed=3)
    assert counts["missed"] == counts["tracebacks"] == 0, counts
    assert counts["found"] == 16
