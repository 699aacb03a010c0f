"""Stop strings over tokens of bytes and of several characters: the first token that completes one, and no other."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.groups import Completion, VersionSpan
from paceline.rollout.stop_strings import StopStrings, cut

PIECES = ["a", "b", "</", "answer", ">", ">\n", "x<", "/answer>", " "]


def of_pieces(ids: list[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def of_bytes(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def ids_of(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("pieces", "num_tokens", "text"),
    [
        (("a", "</", "answer", ">", "b"), 4, "a</answer>"),
        (("a", "</", "answer", ">\n", "b"), 4, "a</answer>"),
        (("x<", "/answer>", "b"), 2, "x</answer>"),
        (("</", "answer", "a", "</", "answer", ">"), 6, "</answera</answer>"),
        (("a", "b", "</", "answer"), None, ""),
    ],
)
def test_the_token_that_completes_the_string_is_the_last(
    pieces: tuple[str, ...], num_tokens: int | None, text: str
) -> None:
    stop = StopStrings(("</answer>", "never"), of_pieces)
    scanner = stop.scanner()
    ids = ids_of(*pieces)
    assert scanner.push(ids) == (num_tokens is not None)
    assert scanner.num_tokens == (num_tokens or len(ids))
    if num_tokens:
        assert stop.end(np.array(ids[:num_tokens], np.int32)) == text


@pytest.mark.parametrize("string", ["€", "é€", "a€"])
def test_a_string_of_several_bytes_is_complete_with_its_last_byte(string: str) -> None:
    stop = StopStrings((string,), of_bytes)
    scanner = stop.scanner()
    ids = [*f"xé{string}y".encode()]
    scanner.push(ids)
    assert scanner.num_tokens == len(f"xé{string}".encode())
    assert stop.end(np.array(ids[: scanner.num_tokens], np.int32)) == f"xé{string}"


def test_a_string_may_begin_in_the_prefix_and_ends_nothing_before_the_least_length() -> None:
    prefix = Completion(np.array(ids_of("a", "</", "answer"), np.int32), np.zeros(3, np.float32), (), "abort")
    stop = StopStrings(("</answer>",), of_pieces)
    scanner = stop.scanner(prefix=prefix)
    assert not scanner.stopped
    assert scanner.push(ids_of(">"))
    assert scanner.num_tokens == 4
    late = stop.scanner(min_tokens=5)
    ids = ids_of("</", "answer", ">", "a", "x<", "/answer>")
    assert late.push(ids)
    assert late.num_tokens == 6
    assert stop.end(np.array(ids, np.int32)) == "</answer>ax</answer>"


def test_of_two_strings_in_one_token_the_text_ends_with_the_first() -> None:
    stop = StopStrings(("er>", "an"), of_pieces)
    assert stop.end(np.array(ids_of("a", "/answer>"), np.int32)) == "a/an"


def test_an_empty_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(("a", ""), of_bytes)


def test_a_cut_keeps_numbers_and_versions_of_what_stays() -> None:
    spans = (VersionSpan(1, 0, 0, 2), VersionSpan(1, 1, 2, 4, "rollout-1"), VersionSpan(1, 2, 4, 5))
    whole = Completion(np.arange(5, dtype=np.int32), -np.arange(5, dtype=np.float32), spans, "abort")
    part = cut(whole, 3)
    assert part.token_ids.tolist() == [0, 1, 2]
    assert part.logprobs.tolist() == [0, -1, -2]
    assert part.spans == (VersionSpan(1, 0, 0, 2), VersionSpan(1, 1, 2, 3, "rollout-1"))
    assert part.finish_reason == "stop"
