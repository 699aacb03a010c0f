"""Nodes from options and from the variables of launchers."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from paceline.errors import InvalidInput
from paceline.services.learner.main import main
from paceline.services.learner.nodes.settings import (
    NodeSettings,
    first_of_nodelist,
    node_settings,
    ranks_of_node,
)

TORCHRUN = {"PET_NNODES": "2:4", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "head.example:29500"}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}
LWS = {"LWS_GROUP_SIZE": "3", "LWS_WORKER_INDEX": "2", "LWS_LEADER_ADDRESS": "learner-0.learner.ns"}
SLURM = {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "gpu[003-004]"}
JOB = {"JOB_COMPLETION_INDEX": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, NodeSettings(2, 4, 1, "head.example:29500")),
        (KUBEFLOW, NodeSettings(2, 2, 1, "job-master-0:23456")),
        (LWS, NodeSettings(3, 3, 2, "learner-0.learner.ns:29400")),
        (SLURM, NodeSettings(2, 2, 0, "gpu003:29400")),
        (JOB, None),
        (
            SLURM | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": "n[7-8]"},
            NodeSettings(2, 2, 0, "n7:29400"),
        ),
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n[7-8]"}, None),
        (TORCHRUN | {"RANK": "1", "LOCAL_RANK": "0"}, None),
        ({}, None),
        ({"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}, None),
    ],
)
def test_the_variables_of_launchers(environment: dict[str, str], expected: NodeSettings | None) -> None:
    assert node_settings("", None, "", environment, "host") == expected


def test_options_go_before_variables() -> None:
    assert node_settings("4", 3, "a:1", SLURM, "host") == NodeSettings(4, 4, 3, "a:1")
    assert node_settings("1", None, "", SLURM, "host") is None


def test_a_pod_of_an_indexed_job_finds_the_first_by_its_own_name() -> None:
    settings = node_settings("2", None, "", JOB, "run-learner-1.learner.ns.svc")
    assert settings == NodeSettings(2, 2, 1, "run-learner-0.learner.ns.svc:29400")


def test_the_address_of_the_first_node() -> None:
    master = {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "NODE_RANK": "1"}
    assert node_settings("", None, "", master, "host") is None
    assert node_settings("2", None, "", master, "host") == NodeSettings(2, 2, 1, "head:29500")
    assert node_settings("2", None, "", JOB | {"MASTER_ADDR": "head"}, "pod-1.ns") == NodeSettings(
        2, 2, 1, "head:29400"
    )


@pytest.mark.parametrize(
    ("nodes", "node_rank", "rendezvous", "said"),
    [
        ("", 0, "", "give --nodes as well"),
        ("", None, "a:1", "give --nodes as well"),
        ("two", 0, "a:1", "--nodes 'two' is malformed"),
        ("0", 0, "a:1", "--nodes '0' is malformed"),
        ("4:2", 0, "a:1", "--nodes '4:2' is malformed"),
        ("2", None, "a:1", "--node-rank is missing: .* from 0 to 1"),
        ("2", 2, "a:1", "--node-rank 2 is none of the 2 nodes"),
        ("2", -1, "a:1", "--node-rank -1 is none of the 2 nodes"),
        ("2", 0, "", "--rendezvous is missing"),
        ("2", 0, "a", "--rendezvous 'a' is malformed"),
    ],
)
def test_bad_options_are_named(nodes: str, node_rank: int | None, rendezvous: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        node_settings(nodes, node_rank, rendezvous, {}, "host")


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[003-004,9],login1", "gpu003"),
        ("gpu[7,9]", "gpu7"),
        ("rack-2-[1-3]", "rack-2-1"),
        ("", ""),
    ],
)
def test_the_first_of_a_node_list(text: str, first: str) -> None:
    assert first_of_nodelist(text) == first


def test_several_tasks_of_srun_on_one_host_are_refused() -> None:
    with pytest.raises(InvalidInput, match="--ntasks-per-node=1"):
        node_settings("", None, "", SLURM | {"SLURM_LOCALID": "1"}, "host")


def test_ranks_of_a_node() -> None:
    assert ranks_of_node({}) == 1
    assert ranks_of_node({"PET_NPROC_PER_NODE": "8"}) == 8
    for text in ("auto", "0", "-1", "2:4", ""):
        with pytest.raises(InvalidInput, match="is no number of ranks; give --ranks"):
            ranks_of_node({"PET_NPROC_PER_NODE": text})


def test_a_rendezvous_beyond_this_host_asks_for_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_INSECURE", raising=False)
    options = ["--nodes", "2", "--node-rank", "1", "--rendezvous", "192.0.2.1:29400"]
    answer = CliRunner().invoke(main, options)
    assert answer.exit_code == 2
    assert "--rendezvous 192.0.2.1:29400 is beyond this host" in answer.output


def test_options_that_do_not_fit_are_usage_errors() -> None:
    answer = CliRunner().invoke(main, ["--nodes", "2", "--node-rank", "2", "--rendezvous", "localhost:29400"])
    assert answer.exit_code == 2
    assert "--node-rank 2 is none of the 2 nodes" in answer.output
