"""Log lines that a sender causes appear at most once a second, and unexpected exceptions are counted."""

from __future__ import annotations

import logging

import pytest

from paceline.rate_limited_log import MAX_KINDS, RateLimitedLog, SeldomFilter, Unforeseen

log = logging.getLogger("test")


def test_one_kind_is_written_once_a_second_with_the_number_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = [0.0]
    seldom = RateLimitedLog(log, clock=lambda: now_s[0])
    for _ in range(5):
        seldom.warning("a", "a said %d", 1)
    seldom.warning("b", "b said %d", 2)
    now_s[0] = 1.0
    seldom.warning("a", "a said %d", 3)
    assert [record.getMessage() for record in caplog.records] == [
        "a said 1",
        "b said 2",
        "a said 3 (and 4 more since this message was last logged)",
    ]


def test_the_number_of_kinds_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    seldom = RateLimitedLog(log, clock=lambda: 0.0)
    for number in range(MAX_KINDS + 1):
        seldom.warning(f"kind {number}", "filling")
    for number in (MAX_KINDS, 1, 0):
        seldom.warning(f"kind {number}", "kind %d", number)
    assert [record.getMessage() for record in caplog.records[MAX_KINDS + 1 :]] == ["kind 0"]


def test_unforeseen_exceptions_are_counted_and_logged_with_their_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unforeseen = Unforeseen(log)
    for _ in range(3):
        try:
            {}["missing"]
        except KeyError as error:
            told = unforeseen.note("Get", error)
    assert unforeseen.total == 3
    assert told == "unexpected KeyError in Get; the traceback is in this service's log"
    (record,) = caplog.records
    assert record.exc_info is not None


def test_a_librarys_logger_writes_each_text_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    library = logging.getLogger("library")
    seldom = SeldomFilter(clock=lambda: now_s[0])
    library.addFilter(seldom)
    for number in range(3):
        library.error("unexpected %d", number)
    library.error("other")
    now_s[0] = 1.0
    library.error("unexpected %d", 3)
    assert [record.getMessage() for record in caplog.records] == ["unexpected 0", "other", "unexpected 3"]
    for number in range(MAX_KINDS + 1):
        library.error(f"text {number}")
    for number in (MAX_KINDS, 1, 0):
        library.error(f"text {number}")
    assert [record.getMessage() for record in caplog.records[MAX_KINDS + 4 :]] == ["text 0"]
