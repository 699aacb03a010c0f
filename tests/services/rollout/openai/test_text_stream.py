"""Streamed text equals the text that is decoded at once, and no part of a stop string is returned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.rollout.openai.sampling import TextStream


def decode(ids: list[int]) -> str:
    """A byte-level tokenizer."""
    return bytes(ids).decode(errors="replace")


def pieces(ids: list[int], *stop: str) -> tuple[TextStream, list[str]]:
    stream = TextStream(decode, stop)
    return stream, [*(stream.push([token_id]) for token_id in ids), stream.finish()]


@given(st.lists(st.integers(0, 255), max_size=40))
def test_pieces_join_to_the_whole_whatever_the_bytes(ids: list[int]) -> None:
    assert "".join(pieces(ids)[1]) == decode(ids)


@given(st.text("ab€", max_size=30), st.lists(st.text("ab€", min_size=1, max_size=3), max_size=3))
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    stream, parts = pieces(list(text.encode()), *stops)
    # The stop string that is complete first wins; if several end there, the text ends before the longest.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert "".join(parts) == text
        assert not stream.stopped
        return
    seen = text[: min(ends)]
    assert "".join(parts) == seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    assert stream.stopped
    assert stream.num_tokens == len(seen.encode())


def test_what_may_become_a_stop_string_is_held_back_until_it_is_known() -> None:
    _, parts = pieces(list(b"one\n\ntwo\n\n\nrest"), "\n\n\n")
    assert parts[:6] == ["o", "n", "e", "", "", "\n\nt"]
    assert "".join(parts) == "one\n\ntwo"


def test_a_character_comes_whole() -> None:
    _, parts = pieces(list("a€b".encode()))
    assert parts == ["a", "", "", "€", "b", ""]


@pytest.mark.parametrize("stop", [(), ("x",)])
def test_bytes_that_never_become_a_character_come_at_the_end(stop: tuple[str, ...]) -> None:
    _, parts = pieces([97, 0xE2, 0x82], *stop)
    assert parts == ["a", "", "", "\ufffd"]


def test_special_tokens_have_no_text_and_do_no_harm() -> None:
    words = {1: "Hi", 2: "", 3: "!"}
    stream = TextStream(lambda ids: "".join(words[i] for i in ids))
    assert [stream.push([1, 2]), stream.push([2]), stream.push([3]), stream.finish()] == ["Hi", "", "!", ""]
    assert stream.num_tokens == 4
