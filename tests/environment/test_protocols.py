"""Sampling parameters keep every field between a lease and a request."""

from __future__ import annotations

from paceline.environment.protocols import TurnParams
from paceline.v1 import common_pb2


def test_parameters_of_a_lease_are_those_of_the_request() -> None:
    lease = common_pb2.SamplingParams(
        max_new_tokens=7, min_new_tokens=1, temperature=0.5, top_p=0.25, top_k=3, stop_token_ids=[4, 9]
    )
    params = TurnParams.of(lease)
    assert params == TurnParams(7, 1, 0.5, 0.25, 3, (4, 9))
    assert params.proto() == lease
    assert {field.name for field in lease.DESCRIPTOR.fields} == set(TurnParams._fields)
