"""Settings of pools: bounds, and refusals with the name, the value and what may be there."""

from __future__ import annotations

import pytest

from paceline.errors import InvalidInput
from paceline.services.coordinator.scaling.policy import Bounds, PoolConfig, read_pool, read_pools


def test_settings_become_a_pool() -> None:
    pool = read_pool(
        "role=rollout,name=h100,members=rollout-h100-,minWorkers=1,maxWorkers=12,firstWorkers=2,coldStartSeconds=240,"
        "idleSeconds=60,holdSeconds=90.5,costPerHour=2.5"
    )
    bounds = Bounds(least=1, most=12, first=2, cold_start_s=240.0, idle_s=60.0, low_s=90.5)
    assert pool == PoolConfig("rollout", "h100", "rollout-h100-", bounds, 2.5)
    assert pool.has("rollout", "rollout-h100-5d9")
    assert not pool.has("rollout", "rollout-a10-5d9")
    assert not pool.has("reward", "rollout-h100-5d9")


def test_only_the_role_has_to_be_named() -> None:
    assert read_pool("role=reward") == PoolConfig("reward", "reward")
    assert read_pool("role=reward").bounds.hold_s == 300.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a setting of a pool; the settings are role=, name="),
        ("role=learner", "role is 'learner', but must be one of rollout, reward, environment"),
        ("maxWorkers=3", "role is ''"),
        ("role=reward,maxworkers=3", "'maxworkers=3' is not a setting of a pool"),
        ("role=reward,maxWorkers", "'maxWorkers' is not a setting of a pool"),
        ("role=reward,maxWorkers=3,maxWorkers=4", "maxWorkers is given twice: '3' and '4'"),
        ("role=reward,maxWorkers=many", "maxWorkers is 'many', but must be a number from 0 to 100000"),
        ("role=reward,minWorkers=-1", "minWorkers is '-1'"),
        ("role=reward,idleSeconds=nan", "idleSeconds is 'nan'"),
        ("role=reward,costPerHour=inf", "costPerHour is 'inf'"),
        ("role=reward,minWorkers=5,maxWorkers=2", "minWorkers is 5 and maxWorkers 2"),
        ("role=reward,maxWorkers=0", "maxWorkers must be at least 1"),
        ("role=reward,members=a\nb", "must be the first characters of member names"),
        ("role=reward,name=cheap", "name is 'cheap', but must be the role"),
        ("role=reward,members=a-,name=rollout", "name is 'rollout', but must be the role"),
        ("role=reward,members=a-,name=a/b", "name is 'a/b'"),
        ("role=" + "x" * 1000, "x" * 128 + "'"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_pool(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["role=reward", "role=reward"], "two pools have the name 'reward'"),
        (["role=rollout,members=a-", "role=rollout,name=b,members=a-b"], "name the same rollout workers"),
        (["role=rollout,name=b,members=a-", "role=rollout"], "name the same rollout workers"),
    ],
)
def test_pools_with_the_same_name_or_workers_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_pools(texts)


def test_roles_may_have_members_of_one_name() -> None:
    assert len(read_pools(["role=rollout,members=a-", "role=reward,members=a-", "role=environment"])) == 3
