"""The learner's hosts, on which all ranks agree."""

from __future__ import annotations

import pytest

from paceline.errors import InvalidInput
from paceline.learner.weights.host_channel import NO_RELAY, hosts_of, piece_algorithm

A, B, EAST, WEST = b"a" * 16, b"b" * 16, b"e" * 32, b"w" * 32


def test_ranks_with_one_agent_are_one_host_and_its_first_rank_speaks_for_it() -> None:
    notes = [(A, EAST), (A, EAST), (B, EAST), (B, EAST)]
    hosts = [hosts_of(notes, rank, b"t") for rank in range(4)]
    assert [h.host_of_rank for h in hosts if h is not None] == [(0, 0, 1, 1)] * 4
    assert [(h.source, h.is_leader, h.num_hosts) for h in hosts if h is not None] == [
        (0, True, 2),
        (0, False, 2),
        (1, True, 2),
        (1, False, 2),
    ]


def test_where_one_rank_has_no_agent_nobody_uses_one() -> None:
    assert hosts_of([(A, EAST), (NO_RELAY, EAST)], 0, b"t") is None


def test_a_learner_across_zones_is_refused() -> None:
    with pytest.raises(InvalidInput, match="Start all its ranks in one zone"):
        hosts_of([(A, EAST), (B, WEST)], 1, b"t")


def test_bytes_that_cross_a_network_have_a_cryptographic_digest() -> None:
    assert (piece_algorithm(True), piece_algorithm(False)) == ("xxh3_128", "sha256")
