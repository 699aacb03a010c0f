"""A version's tensors in a segment: views of the received bytes, under every name of an engine."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import InvalidInput, Unavailable, WireError
from paceline.weights.hosts.host_weights import HostWeights, SegmentPair


def tensors() -> dict[str, torch.Tensor]:
    shared = torch.arange(6, dtype=torch.float32).view(2, 3)
    return {"embed": shared, "head": shared, "norm": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}


def test_packed_tensors_are_views_of_a_segment_that_takes_the_next_version_too() -> None:
    segments = SegmentPair()
    first = HostWeights.packed(tensors(), segments, 0)
    assert list(first) == ["embed", "head", "norm"]
    assert len(first) == 3
    assert all(torch.equal(first[name], tensor) for name, tensor in tensors().items())
    assert first["head"].data_ptr() == first["embed"].data_ptr() == first.segment.flat().data_ptr()
    first.verify()
    segments.release(first.segment)
    second = HostWeights.packed({**tensors(), "norm": torch.zeros(2, dtype=torch.bfloat16)}, segments, 0)
    assert second.segment is first.segment
    assert first["norm"].tolist() == [0, 0]
    with pytest.raises(Unavailable, match="overwritten"), first.reading():
        pass
    with second.reading():
        pass


def test_a_failure_of_packing_gives_the_segment_back() -> None:
    segments = SegmentPair()
    layout = {"a": torch.ones(3), "b": torch.ones(3)}
    HostWeights.packed(layout, segments, 0)
    for _ in range(3):  # more than there are segments
        with pytest.raises(NotImplementedError):
            HostWeights.packed({"a": torch.ones(3), "b": torch.ones(3, device="meta")}, segments, 0)


def test_verification_is_done_once_and_only_what_is_left_of_it() -> None:
    segments = SegmentPair()
    weights = HostWeights.packed(tensors(), segments, 0)
    assert weights.state == "received"
    weights.verify()
    weights["norm"][0] = 7.0
    weights.verify()
    weights.state = "compared"
    weights.verify()
    assert weights.state == "verified"
    weights.state = "received"
    with pytest.raises(WireError, match="'norm' arrived with"):
        weights.verify()
    for state in ("received", "compared"):
        nan = HostWeights.packed({"weight": torch.tensor([1.0, float("nan")])}, segments, 0)
        nan.state = state  # type: ignore[assignment]
        with pytest.raises(InvalidInput, match="'weight' has NaN"):
            nan.verify()
        segments.release(nan.segment)


def test_further_names_show_the_same_bytes_and_keep_their_checksum() -> None:
    weights = HostWeights.packed({"embed": torch.ones(3)}, SegmentPair(), 0)
    assert weights.under_names({"embed": "embed"}) is weights
    more = weights.under_names({"embed": "embed", "head": "embed"})
    assert list(more) == ["embed", "head"]
    assert more["head"].data_ptr() == weights["embed"].data_ptr()
    assert (more.segment, more.generation, more.state) == (weights.segment, weights.generation, "received")
    more.verify()
