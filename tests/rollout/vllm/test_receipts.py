"""Receipts of readers in other processes: for this order and this reader, or none."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from paceline.errors import InvalidInput, PacelineError, Unavailable, WireError
from paceline.rollout.vllm.receipts import Receipts, receipt_of, write_failure, write_receipt

HASH = "ab" * 32


async def test_all_readers_receipts_are_waited_for() -> None:
    receipts = Receipts(2)
    write_receipt(receipts.path, 1, receipt_of(HASH, 3, 1), 3, 70)
    with pytest.raises(Unavailable, match=r"workers \[0\] of the engine have not read"):
        await receipts.verified(HASH, 3, 0)
    code = f"from paceline.rollout.vllm.receipts import *; write_receipt({receipts.path!r}, 0, receipt_of({HASH!r}, 3, 0), 3, 30)"
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], check=True)
    assert await receipts.verified(HASH, 3, 0) == [30, 70]


async def test_receipts_of_other_contents_orders_and_readers_count_for_nothing() -> None:
    receipts = Receipts(1)
    for receipt, order in (
        (receipt_of(HASH, 2, 0), 2),
        (receipt_of("cd" * 32, 3, 0), 3),
        (receipt_of(HASH, 3, 1), 3),
        (bytes(32), 3),
    ):
        write_receipt(receipts.path, 0, receipt, order, 1)
        with pytest.raises(Unavailable):
            await receipts.verified(HASH, 3, 0)
    write_failure(receipts.path, 0, 2, WireError("of an earlier order"))
    with pytest.raises(Unavailable):
        await receipts.verified(HASH, 3, 0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WireError("tensor 'a' arrived with other bytes"), WireError),
        (InvalidInput("weight 'a' has NaN"), InvalidInput),
        (Unavailable("the segment is gone"), Unavailable),
        (KeyError(), Unavailable),
        (WireError("é" * 1000), WireError),
    ],
)
async def test_a_failure_carries_its_kind_and_reason(error: Exception, kind: type[PacelineError]) -> None:
    receipts = Receipts(2)
    write_failure(receipts.path, 1, 4, error)
    with pytest.raises(kind, match=r"^worker 1 of the engine: ") as raised:
        await receipts.verified(HASH, 4, 60)
    assert type(raised.value) is kind
    assert (str(error) or repr(error))[:90] in str(raised.value)
