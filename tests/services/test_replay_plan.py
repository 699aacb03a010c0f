"""The plan of a replay: the stored spec is read as the coordinator reads it."""

from __future__ import annotations

import pytest
from exchange_drivers import Learner, Reward, Rollout, World, fill

from paceline.errors import SpecError
from paceline.services.cli.recorded.replay import overridden
from paceline.services.replay.plan import plan_replay
from paceline.spec.reading import spec_from_yaml, spec_to_yaml


@pytest.fixture
def trained(world: World) -> World:
    """A run whose first step is trained."""
    fill(Rollout(world), Reward(world), 2)
    assert Learner(world).train(0) is not None
    return world


def spell(world: World, spec_yaml: str) -> None:
    with world.ledger.transaction():
        world.ledger.update_run(world.run_id, spec_yaml=spec_yaml)


def test_keys_of_another_version_are_left_out_and_said(trained: World) -> None:
    assert plan_replay(trained.ledger, trained.run_id, 0).warnings == ()
    spell(trained, spec_to_yaml(trained.spec) + "telepathy: {range: 3}\n")
    plan = plan_replay(trained.ledger, trained.run_id, 0)
    assert plan.spec == trained.spec
    assert (plan.start, plan.end, plan.ranks) == (0, 1, 1)
    assert plan.warnings == ("this version does not know telepathy of the run's spec and ignores them",)


def test_a_spec_that_cannot_be_read_names_its_run_and_what_helps(trained: World) -> None:
    trained.check = False  # its record of the spec is damaged for good
    spell(trained, spec_to_yaml(trained.spec).replace("max_num_steps: 4", "max_num_steps: lots"))
    with pytest.raises(SpecError) as caught:
        plan_replay(trained.ledger, trained.run_id, 0)
    assert "cannot read the spec of run test-1: grpo.max_num_steps" in str(caught.value)
    assert "Use the version that accepted the run" in str(caught.value)


def test_overrides_of_a_replay_are_checked() -> None:
    text = "policy: {model_name: m}\ndata: {train: d}\nrewards: [{function: length}]\n"
    spec = overridden(spec_from_yaml(text), ("loss_fn.ratio_clip_min=0.3",))
    assert spec.loss_fn.ratio_clip_min == 0.3
    with pytest.raises(SpecError, match="did you mean 'ratio_clip_min'"):
        overridden(spec, ("loss_fn.ratio_clip_mn=0.3",))
