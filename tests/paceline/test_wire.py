"""Values are decoded as they were sent; values that do not match are a WireError."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.array_frames import MAX_SAMPLERS
from paceline.errors import WireError
from paceline.groups import (
    MAX_HOLDERS,
    Completion,
    Group,
    VersionSpan,
    held_attempt,
    scores_digest,
    with_holder,
)
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import (
    TurnArrays,
    decode_completions,
    decode_group,
    decode_rewards,
    encode_completions,
    encode_reference,
    parse_message,
)

PROMPT_IDS = np.array([3, 1], np.int32)


def completion(tokens: int, *spans: VersionSpan, reason: str = "stop") -> Completion:
    token_ids_T = np.arange(tokens, dtype=np.int32)
    return Completion(token_ids_T, -0.25 * np.ones(tokens, np.float32), spans, reason, f"text {tokens}")


def test_a_group_comes_back_as_it_was() -> None:
    completions = (
        completion(3, VersionSpan(1, 4, 0, 2, "rollout-b"), VersionSpan(2, 5, 2, 3, "rollout-a")),
        completion(0, reason="abort"),
        completion(1, VersionSpan(2, 5, 0, 1), reason="length"),
    )
    frame = encode_completions(PROMPT_IDS, completions)
    prompt_ids, decoded = decode_completions(frame, ["stop", "abort", "length"], [c.text for c in completions])
    assert prompt_ids.tolist() == [3, 1]
    for before, after in zip(completions, decoded, strict=True):
        assert after.token_ids.tolist() == before.token_ids.tolist()
        assert after.logprobs.tolist() == before.logprobs.tolist()
        assert (after.spans, after.finish_reason, after.text) == (
            before.spans,
            before.finish_reason,
            before.text,
        )
    assert decoded[0].version_steps().tolist() == [4, 4, 5]
    group = Group(7, prompt_ids, decoded)
    assert (group.num_tokens, group.oldest_step) == (4, 4)
    assert group.digest() == Group(7, PROMPT_IDS, completions).digest()
    learners = decode_group(7, frame, [1.0, float("nan"), 0.5])
    assert learners.digest() == group.digest()
    assert learners.rewards_CF is not None
    assert learners.rewards_CF.shape == (3, 1)


def test_reference_logprobs_return_to_their_completions() -> None:
    completions = (
        completion(3, VersionSpan(1, 4, 0, 3)),
        completion(0),
        completion(1, VersionSpan(1, 4, 0, 1)),
    )
    frame = encode_completions(PROMPT_IDS, completions)
    said = [np.array(values, np.float32) for values in ([-0.5, -1.0, -2.5], [], [-3.0])]
    group = decode_group(7, frame, [1.0, 0.0, 0.5], encode_reference(said))
    assert [c.reference_logprobs.tolist() for c in group.completions if c.reference_logprobs is not None] == [
        values.tolist() for values in said
    ]
    assert group.digest() == decode_group(7, frame, [1.0, 0.0, 0.5]).digest()
    with pytest.raises(WireError, match="3 reference_logprobs, but the group has 4 tokens"):
        decode_group(7, frame, [1.0, 0.0, 0.5], encode_reference(said[:1]))


def test_the_digest_covers_every_array() -> None:
    def digest(prompt: list[int], tokens: list[int], logprobs: list[float], span: VersionSpan) -> str:
        one = Completion(np.array(tokens, np.int32), np.array(logprobs, np.float32), (span,), "stop")
        return Group(0, np.array(prompt, np.int32), (one,)).digest()

    span = VersionSpan(1, 0, 0, 2)
    digests = {
        digest([1], [2, 3], [-1, -2], span),
        digest([4], [2, 3], [-1, -2], span),
        digest([1], [2, 4], [-1, -2], span),
        digest([1], [2, 3], [-1, -3], span),
        digest([1], [2, 3], [-1, -2], VersionSpan(1, 1, 0, 2)),
        digest([1], [2, 3], [-1, -2], VersionSpan(2, 0, 0, 2)),
    }
    assert len(digests) == 6


@pytest.mark.parametrize("sampler", ["", "rollout-1"])
def test_a_digest_is_that_of_0_1_0_and_covers_no_sampler(sampler: str) -> None:
    spans = (VersionSpan(1, 4, 0, 2, sampler), VersionSpan(1, 5, 2, 3))
    only = Completion(np.array([2, 3, 4], np.int32), np.array([-1, -2, -0.5], np.float32), spans, "stop")
    group = Group(0, np.array([1], np.int32), (only,))
    assert group.digest() == "b192cc7abdd02aef95522c0b63d8a487"
    old = "db0a901ff47764d62c367766785f795c12057be7e14dc6738b88e6216109e02c"
    assert group.digest(like=old) == old


def test_a_payload_of_0_1_0_names_no_sampler() -> None:
    arrays = {
        "prompt_ids": PROMPT_IDS,
        "token_ids": np.array([5, 6], np.int32),
        "logprobs": np.array([-1, -2], np.float32),
        "lengths": np.array([2], np.int32),
        "spans": np.array([[0, 1, 4, 0, 2]], np.int64),
        "truncated": np.array([False]),
    }
    frame = safetensors.numpy.save(arrays)
    prompt_ids, (only,) = decode_completions(frame, ["stop"], [""])
    assert only.spans == (VersionSpan(1, 4, 0, 2, ""),)
    assert encode_completions(prompt_ids, [only]) == frame


HOSTILE_SAMPLERS: dict[str, tuple[dict[str, Any], str]] = {
    "index beyond the names": (
        {"samplers": [0, 2]},
        r"samplers has the indices \[0, 2\], but sampler_names has 2 names",
    ),
    "index below -1": ({"samplers": [0, -2]}, r"samplers has the indices \[-2, 0\]"),
    "unused name": ({"samplers": [0, -1]}, r"samplers has the indices \[0\]"),
    "too few": ({"samplers": [0]}, "samplers has 1 values for 2 spans"),
    "too many": ({"samplers": [0, 1, 1]}, "samplers has 3 values for 2 spans"),
    "other type": ({"samplers": np.zeros(2, np.int64)}, "array 'samplers' is int64"),
    "other shape": ({"samplers": np.zeros((2, 1), np.int32)}, "array 'samplers' is int32 of 2 dimensions"),
    "no indices": ({"samplers": None}, "no array 'samplers'"),
    "no names": ({"sampler_names": None}, "no array 'sampler_names'"),
    "names of another type": ({"sampler_names": np.zeros(2, np.int8)}, "array 'sampler_names' is int8"),
    "no UTF-8": ({"sampler_names": b"a\n\xff"}, "sampler_names is not UTF-8"),
    "empty": ({"sampler_names": b""}, "sampler_names has '', which is not 1 to 64"),
    "empty name": ({"sampler_names": b"a\n"}, "sampler_names has ''"),
    "long name": ({"sampler_names": b"a\n" + b"b" * 65}, "sampler_names has 'bbb"),
    "unprintable name": ({"sampler_names": b"a\nb\x07"}, r"sampler_names has 'b\\x07'"),
    "repeated name": ({"sampler_names": b"a\na"}, "2 names, 1 of them different"),
    "many names": ({"sampler_names": b"\n".join(b"%d" % n for n in range(MAX_SAMPLERS + 1))}, "has 8193 names"),
    "large names": ({"sampler_names": b"a" * 10**6}, "sampler_names has 1000000 bytes"),
}


def hostile(frame: bytes, change: dict[str, Any]) -> bytes:
    """Return the frame with other samplers: numbers, bytes, an array, or none."""
    arrays = safetensors.numpy.load(frame)
    for name, value in change.items():
        kind = np.int32 if name == "samplers" else np.uint8
        arrays.pop(name)
        if isinstance(value, bytes):
            arrays[name] = np.frombuffer(value, kind)
        elif value is not None:
            arrays[name] = value if isinstance(value, np.ndarray) else np.array(value, kind)
    return safetensors.numpy.save(arrays)


@pytest.mark.parametrize(("change", "fault"), HOSTILE_SAMPLERS.values(), ids=HOSTILE_SAMPLERS.keys())
def test_hostile_samplers_are_a_wire_error(change: dict[str, Any], fault: str) -> None:
    spans = (VersionSpan(1, 4, 0, 2, "rollout-a"), VersionSpan(1, 5, 2, 3, "rollout-b"))
    group = encode_completions(PROMPT_IDS, [completion(3, *spans)])
    turn = TurnArrays(0, PROMPT_IDS, PROMPT_IDS[[0, 1, 0]], -np.ones(3, np.float32), spans).encode()
    with pytest.raises(WireError, match=fault):
        decode_completions(hostile(group, change), ["stop"], [""])
    with pytest.raises(WireError, match=fault):
        TurnArrays.decode(hostile(turn, change))


def test_no_completions_are_no_error_and_no_surprise() -> None:
    _, decoded = decode_completions(encode_completions(PROMPT_IDS, []), [], [])
    assert decoded == ()
    assert Group(0, PROMPT_IDS, decoded).oldest_step == -1


@pytest.mark.parametrize("frame", [b"", b"x", b"\xff" * 100, b"\x02" + bytes(7) + b"{}"])
def test_a_foreign_payload_is_a_wire_error(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode_completions(frame, [], [])
    with pytest.raises(WireError):
        decode_group(0, frame, [])


def test_a_group_without_arrays_is_a_wire_error() -> None:
    frame = safetensors.numpy.save({"token_ids": np.zeros(2, np.int32)})
    with pytest.raises(WireError, match="no array 'prompt_ids'"):
        decode_group(0, frame, [])


def test_an_unknown_dtype_is_a_wire_error() -> None:
    head = b'{"prompt_ids":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}'
    with pytest.raises(WireError):
        decode_completions(len(head).to_bytes(8, "little") + head + b"\0", [], [])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_payload_is_an_error_or_the_same_kind_of_thing(data: st.DataObject) -> None:
    whole = encode_completions(PROMPT_IDS, [completion(3, VersionSpan(1, 4, 0, 3))])
    position = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[position] ^= data.draw(st.integers(1, 255))
    frame = bytes(damaged[: data.draw(st.sampled_from([len(whole), position]))])
    try:
        _, (only,) = decode_completions(frame, ["stop"], [""])
    except WireError:
        return
    assert len(only.token_ids) == len(only.logprobs) == only.spans[-1].end
    assert np.isfinite(only.logprobs).all()


@pytest.mark.parametrize(("count", "completions"), [(3, 2), (1, 0), (0, 0), (5, 4)])
def test_rewards_that_cannot_be_split(count: int, completions: int) -> None:
    with pytest.raises(WireError):
        decode_rewards([0.0] * count, completions)


def test_rewards_are_rows_of_completions() -> None:
    assert decode_rewards([1.0, 2.0, 3.0, 4.0], 2).tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_a_header_is_parsed_or_refused() -> None:
    header = pb.ExchangeRequest(request_id=7).SerializeToString()
    assert parse_message(pb.ExchangeRequest, header).request_id == 7
    with pytest.raises(WireError, match="frame of 3 bytes is not of type ExchangeRequest"):
        parse_message(pb.ExchangeRequest, b"\xff\xff\xff")


def test_a_digest_of_scores_covers_rewards_and_reference_and_knows_one_not_a_number() -> None:
    other_nan = np.array([0xFFC00001], "<u4").view("<f4")
    assert np.isnan(other_nan[0])
    one, other = decode_rewards([1.0, math.nan], 2), decode_rewards([1.0, float(other_nan[0])], 2)
    assert scores_digest(one) == scores_digest(other) == scores_digest(np.array([[1.0], [np.nan]], np.float32))
    reference = np.array([-0.5, -0.25, -1.0], np.float32)
    assert scores_digest(one, [reference]) == scores_digest(one, [reference[:1], reference[1:]])
    different = [scores_digest(one), scores_digest(one * 2), scores_digest(one, [reference])]
    assert len({*different, scores_digest(one, [reference * 2])}) == 4


def test_holders_are_on_record_by_attempt_and_bounded() -> None:
    lines = with_holder(with_holder("", 1, "a"), 2, "b")
    assert lines == "a\nb"
    assert [held_attempt(lines, attempt) for attempt in (0, 1, 2, 3, 2**40)] == ["", "a", "b", "", ""]
    assert held_attempt("", 1) == ""
    assert with_holder("", 3, "c") == "\n\nc"  # attempts before there was a record
    for attempt in range(3, 1000):
        lines = with_holder(lines, attempt, f"m{attempt}")
    holders = lines.split("\n")
    assert len(holders) == 999
    assert holders[-1] == held_attempt(lines, 999) == "m999"
    assert [attempt for attempt, holder in enumerate(holders, 1) if holder] == list(range(1000 - MAX_HOLDERS, 1000))
