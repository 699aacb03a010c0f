"""Sampling parameters of a run as the coordinator sends them; `paceline.rollout.engine.SamplingParams` reads them."""

from __future__ import annotations

from paceline.spec import GenerationSection
from paceline.v1 import common_pb2


def params_message(generation: GenerationSection) -> common_pb2.SamplingParams:
    """Return `policy.generation` as a message with every field set."""
    return common_pb2.SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        min_new_tokens=generation.min_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_token_ids=generation.stop_token_ids,
    )
