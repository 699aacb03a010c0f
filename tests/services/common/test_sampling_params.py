"""Sampling parameters from the spec to the engine."""

from __future__ import annotations

from paceline.rollout.engine import SamplingParams
from paceline.services.coordinator.exchange.requests.lease import params_message
from paceline.spec import GenerationSection
from paceline.v1 import common_pb2

GENERATION = GenerationSection(
    max_new_tokens=7,
    min_new_tokens=2,
    temperature=0.5,
    top_p=0.75,
    top_k=3,
    stop_token_ids=(4, 9),
    min_p=0.1,
    repetition_penalty=1.5,
    allow_biased_sampling=True,
)


def test_parameters_of_a_lease_are_those_of_the_spec() -> None:
    run = SamplingParams.from_spec(GENERATION)
    assert SamplingParams.from_proto(params_message(GENERATION), run) == run


def test_unset_fields_of_a_request_come_from_the_run() -> None:
    params = SamplingParams.from_request(
        common_pb2.SamplingParams(max_new_tokens=5), SamplingParams.from_spec(GENERATION)
    )
    assert params == SamplingParams(5, 0, 0.5, 1.0, 0, (4, 9), 0.1, 1.5)
