"""Steps whose rewards trained nothing, and steps with an absurd advantage or gradient, are explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exchange_drivers import MakeWorld, World, make_spec

from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.members.registry import Members
from paceline.services.coordinator.reporting.rules import no_signal, out_of_scale
from paceline.services.coordinator.reporting.run_log import RunLog

NOTHING = {"zero_advantage_fraction": 1.0}


@pytest.mark.parametrize(("metrics", "words"), [
    (NOTHING | {"unscored_fraction": 1.0}, "every reward function returned None for every completion"),
    (NOTHING | {"unscored_fraction": 0.0, "reward": 1.0}, "equal rewards of 1 on average"),
    (NOTHING | {"reward": float("nan")}, "equal rewards, so the rewards trained nothing"),
])  # fmt: skip
def test_the_reason_is_in_the_metrics(metrics: dict[str, float], words: str, tmp_path: Path) -> None:
    assert words in no_signal(make_spec(tmp_path), metrics)


def test_completions_that_were_all_cut_off(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, grpo={"overlong_filtering": True})
    assert "cut off at its token limit" in no_signal(spec, NOTHING | {"truncated_fraction": 1.0})


@pytest.mark.parametrize("metrics", [{}, {"zero_advantage_fraction": 0.99, "reward": 0.0}])
def test_a_step_with_a_signal_or_without_advantages_is_not_warned_of(metrics: dict[str, float], tmp_path: Path) -> None:
    assert no_signal(make_spec(tmp_path), metrics) == ""


def warnings_of(world: World) -> list[str]:
    """The messages of the run's warnings."""
    events = world.ledger.events(world.run_id, 0, 100)
    return [json.loads(event["json"])["message"] for event in events if event["kind"] == "warning"]


def test_such_steps_are_warned_of_ever_more_seldom(make_world: MakeWorld) -> None:
    world = make_world(grpo={"max_num_steps": 9})
    world.check = False  # nothing was trained
    run_log = RunLog(world.ledger, world.exchange, Members(60.0))
    learner = {"zero_advantage_fraction": 1.0}
    for step in range(6):
        notices = [
            Notice("metrics", {"metrics": learner if step != 2 else {"zero_advantage_fraction": 0.5}}),
            Notice("step", {"step": step, "metrics": {"reward": 0.0}}),
        ]
        with world.ledger.transaction():
            run_log.write_down(notices)
    found = [message.partition(":")[0] for message in warnings_of(world)]
    assert found == ["step 0", "step 1", "step 4"]  # the first, the second and the fourth without a signal
    assert warnings_of(world)[2].endswith("(4 such steps in this run)")


def test_counts_of_drops_and_failures_are_metrics(make_world: MakeWorld) -> None:
    world = make_world()
    world.check = False  # nothing was dropped
    run_log = RunLog(world.ledger, world.exchange, Members(60.0))
    with world.ledger.transaction():
        world.ledger.count(world.run_id, "groups:dropped:bad_prompt", 2)
        world.ledger.count(world.run_id, "failures:bad_prompt", 6)
        world.ledger.count(world.run_id, "groups:ever_admitted", 14)
        run_log.write_down([Notice("step", {"step": 0, "metrics": {}})])
    (step,) = [e for e in world.ledger.events(world.run_id, 0, 100) if e["kind"] == "step"]
    metrics = json.loads(step["json"])
    assert (metrics["dropped/bad_prompt"], metrics["failures/bad_prompt"]) == (2.0, 6.0)
    assert metrics["epochs"] == 2.0, "14 draws of 7 rows"
    assert metrics["coordinator/memory_gb"] > 0


@pytest.mark.parametrize(("metrics", "words"), [
    ({"advantage_max": 700000.0, "grad_norm": 48410.0}, "an advantage is 700000 before clipping (advantage_max)"),
    ({"advantage_max": 1001.0}, "grpo.advantage 'trl' divides by the spread"),
    ({"grad_norm": 48410.0}, "grad_norm is 48410 before clipping to 1,"),
    ({"advantage_max": 3.0, "value_grad_norm": 2e3}, "value_grad_norm is 2000 before clipping to"),
    ({"advantage_max": 999.0, "grad_norm": 999.0}, ""),
    ({"advantage_max": float("nan"), "grad_norm": float("nan")}, ""),
    ({}, ""),
])  # fmt: skip
def test_an_absurd_number_is_named_with_its_likely_cause(metrics: dict[str, float], words: str, tmp_path: Path) -> None:
    text = out_of_scale(make_spec(tmp_path), metrics)
    assert words in text
    assert bool(text) == bool(words)


def test_a_large_clipping_norm_allows_large_gradients(tmp_path: Path) -> None:
    policy = {"model_name": "none", "generation": {"max_new_tokens": 4}, "max_grad_norm": 50.0}
    spec = make_spec(tmp_path, policy=policy)
    assert out_of_scale(spec, {"grad_norm": 48410.0}) == ""
    assert out_of_scale(spec, {"grad_norm": 50001.0})


def test_sums_over_long_completions_have_large_gradients(tmp_path: Path) -> None:
    metrics = {"grad_norm": 3000.0, "tokens": 32000.0, "sequences": 8.0}
    assert out_of_scale(make_spec(tmp_path, loss_fn={"reduction": "sequence_sum"}), metrics) == ""
    assert out_of_scale(make_spec(tmp_path), metrics)


def test_absurd_steps_are_warned_of_ever_more_seldom(make_world: MakeWorld) -> None:
    world = make_world(grpo={"max_num_steps": 9})
    world.check = False  # nothing was trained
    run_log = RunLog(world.ledger, world.exchange, Members(60.0))
    for step in range(5):
        with world.ledger.transaction():
            run_log.write_down(
                [
                    Notice("metrics", {"metrics": {"advantage_max": 9e5}}),
                    Notice("step", {"step": step, "metrics": {"reward": 0.0}}),
                ]
            )
    found = warnings_of(world)
    assert [message.partition(":")[0] for message in found] == ["step 0", "step 1", "step 3"]
    assert "900000" in found[0]
