"""Sampling: known numbers of the generator, frequencies against the softmax, masks worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.rollout.native.sampling import (
    mask_min_p,
    mask_stop_tokens,
    mask_top,
    mix_seed,
    penalise,
    sample,
    splitmix64,
    uniform,
)

# First outputs of the reference generator for seed 1234567, as published with many implementations of it.
KNOWN_OUTPUTS = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def test_splitmix64_is_the_published_generator() -> None:
    outputs = splitmix64(torch.full((5,), 1234567), torch.arange(5))
    assert [value % 2**64 for value in outputs.tolist()] == KNOWN_OUTPUTS
    assert mix_seed(1234567) % 2**64 == KNOWN_OUTPUTS[0]


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_uniform_numbers_are_uniform_over_seeds_and_over_positions(along: str) -> None:
    counter = torch.arange(20_000)
    seeds = torch.tensor([mix_seed(i if along == "seeds" else 7) for i in range(20_000)])
    numbers = uniform(seeds, counter if along == "positions" else torch.zeros_like(counter))
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    counts = torch.histc(numbers.float(), 20, 0, 1)
    # Chi-square with 19 degrees of freedom: 43.8 has p = 0.001.
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.8


def test_neighbouring_seeds_do_not_share_numbers_shifted_by_one() -> None:
    gamma = 0x9E3779B97F4A7C15
    positions = torch.arange(100)
    first = uniform(torch.full((100,), mix_seed(5)), positions)
    second = uniform(torch.full((100,), mix_seed(5 + gamma)), positions)
    assert not torch.isin(first, second).any()


def test_any_python_integer_is_a_seed() -> None:
    assert mix_seed(2**64 + 3) == mix_seed(3)
    assert -(2**63) <= mix_seed(-1) < 2**63


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    logits_V = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
    n = 20_000
    tokens, logprobs = sample(
        logits_V.expand(n, 5),
        uniform(torch.tensor([mix_seed(i) for i in range(n)]), torch.zeros(n, dtype=torch.int64)),
        torch.full((n,), temperature),
    )
    expected_V = (logits_V / temperature).softmax(-1)
    counts_V = torch.bincount(tokens, minlength=5)
    # Chi-square with 4 degrees of freedom: 18.5 has p = 0.001.
    assert float(((counts_V - n * expected_V) ** 2 / (n * expected_V)).sum()) < 18.5
    torch.testing.assert_close(logprobs, expected_V.log()[tokens])


def test_inverse_of_the_cumulative_distribution_by_hand() -> None:
    probabilities_V = torch.tensor([0.1, 0.2, 0.0, 0.7])
    numbers_R = torch.tensor([0.0, 0.0999, 0.1001, 0.2999, 0.3001, 1 - 2.0**-48], dtype=torch.float64)
    tokens, logprobs = sample(probabilities_V.log().expand(6, 4), numbers_R, torch.ones(6))
    assert tokens.tolist() == [0, 0, 1, 1, 3, 3]
    assert logprobs.exp().tolist() == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.7, 0.7])


def test_top_k_and_top_p_keep_the_likeliest_tokens() -> None:
    logits_V = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    kept = []
    for top_k, top_p in [(0, 1.0), (2, 1.0), (0, 0.4), (0, 0.41), (0, 0.7001), (3, 0.5), (0, 1e-9)]:
        masked_V = mask_top(logits_V[None], torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64))[0]
        kept.append(torch.isfinite(masked_V).nonzero()[:, 0].tolist())
    # With k = 3 the rest is 0.4, 0.3, 0.2 of 0.9: 0.444 is below p = 0.5, so the second one stays, too.
    assert kept == [[0, 1, 2, 3], [1, 3], [1], [1, 3], [1, 2, 3], [1, 3], [1]]


def test_top_k_of_equal_logits_keeps_exactly_k() -> None:
    masked = mask_top(torch.zeros(1, 6), torch.tensor([2]), torch.ones(1))
    assert torch.isfinite(masked).sum() == 2


def test_logprob_is_of_the_masked_distribution() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    token, logprob = sample(
        logits, torch.tensor([0.99], dtype=torch.float64), torch.ones(1), torch.tensor([2]), torch.ones(1)
    )
    assert token.item() == 3
    assert logprob.item() == pytest.approx(math.log(0.3 / 0.7))


def test_stop_tokens_are_masked_only_where_asked_and_padding_is_ignored() -> None:
    stops = torch.tensor([[1, 3, -1], [1, -1, 99]])
    masked = mask_stop_tokens(torch.zeros(2, 4), stops, torch.tensor([True, False]))
    assert masked.isinf().tolist() == [[False, True, False, True], [False, False, False, False]]


def test_min_p_keeps_what_is_likely_beside_the_likeliest() -> None:
    logits = torch.tensor([[0.0, -1.0, -3.0], [0.0, -1.0, -3.0], [5.0, 5.0, 4.0]])
    kept = mask_min_p(logits, torch.tensor([0.3, 0.0, 0.5]))
    assert (kept > -torch.inf).tolist() == [[True, True, False], [True, True, True], [True, True, False]]


def test_a_penalty_is_for_tokens_that_were_there_once_however_often() -> None:
    logits = torch.tensor([[2.0, -2.0, 4.0], [2.0, -2.0, 4.0]])
    tokens = torch.tensor([[0, 0, 1, 2], [2, 0, 0, 0]])
    out = penalise(logits, tokens, torch.tensor([3, 1]), torch.tensor([2.0, 4.0]))
    assert out.tolist() == [[1.0, -4.0, 4.0], [2.0, -2.0, 1.0]]


def test_a_nan_row_is_marked_and_leaves_the_others_alone() -> None:
    logits = torch.tensor([[torch.nan, 0.0], [0.0, -torch.inf]])
    tokens, logprobs = sample(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), torch.ones(2))
    assert logprobs[0].isnan()
    assert 0 <= tokens[0] < 2
    assert (tokens[1].item(), logprobs[1].item()) == (0, 0.0)
