"""The dictionary of foreign names: all its keys are in the spec, and a lookup returns the nearest entry."""

from __future__ import annotations

import re

import pytest

from paceline.spec.foreign import TABLES, ForeignName, look_up, table, values
from paceline.spec.keys import keys

ENTRIES = [entry for library in TABLES for entry in table(library).values()]


def test_every_key_of_the_dictionary_is_one_of_the_spec() -> None:
    assert [(entry.name, entry.key) for entry in ENTRIES if entry.key and entry.key not in KNOWN] == []
    assert [key for key in values() if key not in KNOWN] == []


KNOWN = {*keys(), "rewards.N.kwargs"}


def test_an_entry_has_a_key_or_a_reason_and_never_both() -> None:
    assert [entry.name for entry in ENTRIES if bool(entry.key) == bool(entry.none)] == []


def test_the_dictionary_has_some_hundreds_of_names() -> None:
    assert len(ENTRIES) > 600
    assert min(len(table(library)) for library in TABLES[:4]) > 100


def test_no_name_is_a_key_of_the_spec_already() -> None:
    """A key that exists is never unknown, so an entry for it would be dead."""
    assert [entry.name for entry in ENTRIES if entry.name in keys()] == []


def test_values_that_are_carried_over_are_accepted_there() -> None:
    """The values of an entry with choices are among the choices of its key."""
    wrong = []
    for entry in ENTRIES:
        choices = set(re.findall(r"`([^`]+)`", keys()[entry.key].type_text)) if entry.key in keys() else set()
        if choices and entry.values:
            wrong += [(entry.name, value) for value in entry.values.values() if value not in choices]
    assert wrong == []


@pytest.mark.parametrize(
    ("typed", "name", "library"),
    [
        ("beta", "beta", "TRL"),
        ("grpo.beta", "beta", "TRL"),
        ("dpo.beta", "dpo.beta", "NeMo RL"),
        ("policy.dtensor_cfg.cpu_offload", "policy.dtensor_cfg.cpu_offload", "NeMo RL"),
        ("policy.dtensor_cfg.clip.deep", "policy.dtensor_cfg.*", "NeMo RL"),
        ("actor.ppo_mini_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size", "verl"),
        ("trainer.optim.lr", "trainer.optim.lr", "prime-rl"),
    ],
)
def test_the_nearest_entry_answers(typed: str, name: str, library: str) -> None:
    found = look_up(typed)
    assert isinstance(found, ForeignName)
    assert (found.name, found.library) == (name, library)


@pytest.mark.parametrize("typed", ["", "x", "enabled", "grpo.shuffle", "name", "data.nothing_like_it"])
def test_a_name_that_no_library_has_or_that_means_many_things_is_not_answered(typed: str) -> None:
    assert look_up(typed) is None
