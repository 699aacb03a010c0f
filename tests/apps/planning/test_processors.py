"""Processors by name."""

from __future__ import annotations

import pytest

from paceline.apps.planning.processors import PROCESSORS, UNMEASURED, read_gpus
from paceline.errors import InvalidInput


def test_a_name_and_a_number() -> None:
    processor, number = read_gpus("H100:64")
    assert (processor.name, number, processor.memory_bytes) == ("h100", 64, 80 * 10**9)
    assert read_gpus("l4") == (PROCESSORS["l4"], 1)
    assert not read_gpus("cpu:8")[0].is_gpu


@pytest.mark.parametrize("text", ["", "h100:", "h100:0", "v100:8", "h100:64:2", "h100:99999999", "x" * 500])
def test_anything_else_is_refused_with_the_names(text: str) -> None:
    with pytest.raises(InvalidInput, match="such as h100:64, of h100, h200, b200") as caught:
        read_gpus(text)
    assert len(str(caught.value)) < 300


def test_rates_say_whether_they_were_measured() -> None:
    assert all(p.measured == UNMEASURED for p in PROCESSORS.values() if p.is_gpu)
    assert "benchmarks/capacity.py" in PROCESSORS["cpu"].measured
