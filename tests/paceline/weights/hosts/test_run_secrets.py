"""Who may read, and which refused readers were strangers."""

from __future__ import annotations

import pytest

from paceline.weights.hosts.frames import proof
from paceline.weights.hosts.run_secrets import MAX_WAITING, WAIT_S, RefusedReader, RunSecrets

NONCE = b"n" * 16


class Bench:
    """Secrets with a clock that stands still, and the strangers that were found."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.strangers: list[RefusedReader] = []
        self.secrets = RunSecrets(self.strangers.append, lambda: self.now_s)

    def refuse(self, run_id: str, given: bytes, address: str = "10.0.0.1:5") -> None:
        self.secrets.note_refused(address, run_id, NONCE, given, "no proof")

    def judge(self) -> list[str]:
        self.secrets.judge()
        return [reader.run_id for reader in self.strangers]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_readers_of_the_present_run_alone_are_admitted(bench: Bench) -> None:
    bench.secrets.use("a", b"secret a")
    assert bench.secrets.admits("a", NONCE, proof(b"secret a", NONCE))
    assert not bench.secrets.admits("a", NONCE, proof(b"another", NONCE))
    bench.secrets.use("b", b"secret b")
    assert not bench.secrets.admits("a", NONCE, proof(b"secret a", NONCE))
    assert bench.secrets.admits("b", NONCE, proof(b"secret b", NONCE))


def test_a_reader_without_a_secret_of_the_run_is_a_stranger_after_a_while(bench: Bench) -> None:
    bench.secrets.use("a", b"secret a")
    bench.refuse("a", proof(b"guessed", NONCE))
    bench.refuse("x", NONCE)
    bench.now_s += WAIT_S - 0.1
    assert bench.judge() == []
    bench.now_s += 0.1
    assert bench.judge() == ["a", "x"]
    assert bench.judge() == ["a", "x"]


def test_a_reader_that_was_before_its_plan_or_behind_the_next_is_none(bench: Bench) -> None:
    bench.secrets.use("a", b"secret a")
    bench.refuse("b", proof(b"secret b", NONCE))  # its plan is on its way
    bench.secrets.use("b", b"secret b")
    bench.refuse("a", proof(b"secret a", NONCE))  # of the run before
    bench.now_s += WAIT_S
    assert bench.judge() == []


def test_any_number_of_readers_with_long_messages_costs_little(bench: Bench) -> None:
    for _ in range(MAX_WAITING + 10):
        bench.refuse("x" * 100_000, b"p" * 100_000)
    assert len(bench.strangers) == 10
    assert max(len(reader.run_id) + len(reader.given) for reader in bench.strangers) < 1_000
