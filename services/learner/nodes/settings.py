"""Reads the number of a learner's nodes, this host's position among them, and their rendezvous, from options and
environment.

A node is a host of a learner. The variables of these launchers are read, in this order: torchrun's (`PET_…`, which
Kubeflow's trainer sets too), LeaderWorkerSet's (`LWS_…`), Slurm's (`SLURM_…`), the index of an indexed Job or JobSet
(`JOB_COMPLETION_INDEX`), and `MASTER_ADDR` with `NODE_RANK`. The last two do not give the number of nodes. The first
pod of an indexed Job is `MASTER_ADDR`; without that variable, the name of the first pod is derived from this pod's
name. Options take precedence over variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.calls.connection import checked_address
from paceline.errors import InvalidInput

PORT = 29400
"""Port of the rendezvous if none is given."""
MAX_NODES = 4096
NODES = re.compile(r"(\d{1,4})(?::(\d{1,4}))?")
POD = re.compile(r"(.+)-\d+")
BRACKETS = re.compile(r"([^\[\],]*)(?:\[([0-9,-]+)\])?[^,]*")


@dataclass(frozen=True)
class NodeSettings:
    """This host among the nodes of a learner."""

    least: int
    """Least number of nodes with which a session begins."""
    most: int
    """Largest number of nodes in a session."""
    node_rank: int
    """Position of this node, from 0. Node 0 hosts the rendezvous."""
    rendezvous: str
    """HOST:PORT where the nodes meet."""


@dataclass(frozen=True)
class _Variables:
    """Values of a launcher's variables; a missing variable is an empty text."""

    source: str = ""
    nodes: str = ""
    node_rank: str = ""
    host: str = ""
    port: str = ""


def node_settings(
    nodes: str, node_rank: int | None, rendezvous: str, environment: Mapping[str, str], hostname: str
) -> NodeSettings | None:
    """Return the settings, or None for a learner on only this host. `nodes` is N or MIN:MAX, empty if not given;
    `hostname` is this host's name, with its domain if it has one. Raises InvalidInput, naming the option."""
    variables = _Variables() if is_rank(environment) and not nodes else _read_variables(environment, hostname)
    text = nodes or variables.nodes
    if not text:
        if node_rank is not None or rendezvous:
            raise InvalidInput("--node-rank and --rendezvous are for several nodes; give --nodes as well")
        return None
    least, most = _range(text, "--nodes" if nodes else variables.source)
    if most == 1:
        return None
    rank = str(node_rank) if node_rank is not None else variables.node_rank
    if not rank:
        raise InvalidInput(
            f"--node-rank is missing: give the position of this host among the {most} nodes, from 0 to {most - 1}"
        )
    if not rank.isdecimal() or int(rank) >= most:
        raise InvalidInput(f"--node-rank {rank} is none of the {most} nodes: nodes count from 0 to {most - 1}")
    if variables.source.startswith("SLURM_") and environment.get("SLURM_LOCALID", "0") != "0":
        raise InvalidInput(
            "srun has started several tasks on this host: start one task for each host, with --ntasks-per-node=1, and give --ranks"
        )
    if not rendezvous and not variables.host:
        raise InvalidInput("--rendezvous is missing: give HOST:PORT of node 0, the same on every node")
    address = rendezvous or f"{variables.host}:{variables.port or PORT}"
    return NodeSettings(
        least, most, int(rank), checked_address(address, "--rendezvous" if rendezvous else variables.source)
    )


def is_rank(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun or another launcher has started this process as one rank of several."""
    return "RANK" in environment and "LOCAL_RANK" in environment


def ranks_of_node(environment: Mapping[str, str]) -> int:
    """Return the number of ranks on this host by torchrun's variable; 1 without it. Raises InvalidInput."""
    text = environment.get("PET_NPROC_PER_NODE", "1")
    if not NODES.fullmatch(text) or not text.isdecimal() or not int(text):
        raise InvalidInput(f"PET_NPROC_PER_NODE {text!r:.40} is no number of ranks; give --ranks")
    return int(text)


def _range(text: str, source: str) -> tuple[int, int]:
    match = NODES.fullmatch(text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most <= MAX_NODES:
        raise InvalidInput(f"{source} {text!r} is malformed: it must be a number of nodes, or MIN:MAX such as 2:4")
    return least, most


def _read_variables(environment: Mapping[str, str], hostname: str) -> _Variables:
    get = environment.get
    if nodes := get("PET_NNODES"):
        host, _, port = get("PET_RDZV_ENDPOINT", "").rpartition(":")
        if not host:
            host, port = get("PET_RDZV_ENDPOINT") or get("PET_MASTER_ADDR", ""), get("PET_MASTER_PORT", "")
        return _Variables("PET_NNODES", nodes, get("PET_NODE_RANK", ""), host, port)
    if nodes := get("LWS_GROUP_SIZE"):
        return _Variables("LWS_GROUP_SIZE", nodes, get("LWS_WORKER_INDEX", ""), get("LWS_LEADER_ADDRESS", ""))
    # The variables of the step, because a job may run the learner on some of its nodes. A batch script, and a service
    # that it starts without srun, has only the job's variables: that service is one host, whatever the job has.
    if nodes := get("SLURM_STEP_NUM_NODES"):
        first = first_of_nodelist(get("SLURM_STEP_NODELIST") or get("SLURM_JOB_NODELIST", ""))
        return _Variables("SLURM_STEP_NUM_NODES", nodes, get("SLURM_NODEID", ""), first)
    host, port = get("MASTER_ADDR", ""), get("MASTER_PORT", "")
    if index := get("JOB_COMPLETION_INDEX"):
        pod, dot, domain = hostname.partition(".")
        name = POD.fullmatch(pod)
        first = f"{name[1]}-0{dot}{domain}" if name else ""
        return _Variables("JOB_COMPLETION_INDEX", "", index, host or first, port if host else "")
    return _Variables("MASTER_ADDR", "", get("NODE_RANK", ""), host, port)


def first_of_nodelist(text: str) -> str:
    """Return the first host of a Slurm node list such as `gpu[003-004,9],login1`; empty if the list has no host."""
    match = BRACKETS.match(text)
    if not match or not match[1]:
        return ""
    return match[1] + re.split("[-,]", match[2])[0] if match[2] else match[1]
