"""Records of the library verifiers (0.2 and later, `traces.jsonl`) as traces.

A record is one rollout: a graph of messages (`nodes`, each with its parent), and rewards with weights. Where its nodes have
tokens, masks and log-probabilities the behaviour policy is the recorded one; else the row is text.

Promise: only rollouts of one answer become traces, because a trace has one prompt; others are left out and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.apps.traces.spans import Json, Unusable


def is_rollout(record: Mapping[str, Any]) -> bool:
    """Return whether a line is such a record."""
    return isinstance(record.get("nodes"), list) and "task" in record


def row_of_rollout(record: Mapping[str, Any]) -> Json:
    """Return the row of a rollout. Raises Unusable."""
    nodes = record["nodes"]
    sampled = [index for index, node in enumerate(nodes) if node.get("sampled")]
    if not sampled:
        raise Unusable("no answer of the model")
    if len(sampled) > 1:
        raise Unusable("several answers in one rollout")
    path = _path(nodes, sampled[0])
    messages = [_message(node["message"]) for node in path]
    row: Json = {
        "prompt": messages[:-1],
        "completion": messages[-1:],
        "final_reward": _reward(record.get("rewards")),
        "tools": _tools(record.get("tools")),
        "trace_id": record.get("id"),
    }
    tokens = _tokens(path)
    return row if tokens is None else row | tokens


def _path(nodes: list[Any], index: int | None) -> list[Json]:
    """Return the nodes from the root to node `index`."""
    path: list[Json] = []
    while index is not None:
        if not 0 <= index < len(nodes) or len(path) == len(nodes):
            raise Unusable("a message whose parents are not in the record")
        path.append(nodes[index])
        index = nodes[index].get("parent")
    return path[::-1]


def _message(message: Mapping[str, Any]) -> Json:
    """Return a message without empty keys."""
    calls = [
        {
            "id": call.get("id"),
            "type": "function",
            "function": {key: call.get(key) for key in ("name", "arguments")},
        }
        for call in message.get("tool_calls") or ()
    ]
    kept = {key: message[key] for key in ("role", "reasoning_content", "tool_call_id") if message.get(key)}
    return kept | {"content": message.get("content") or ""} | ({"tool_calls": calls} if calls else {})


def _reward(rewards: Any) -> float | None:
    """Return the sum of the weighted rewards; None where nothing judged the rollout."""
    if not rewards:
        return None
    values = [
        value["score"] * value.get("weight", 1.0) if isinstance(value, Mapping) else value
        for value in rewards.values()
    ]
    return float(sum(values))


def _tools(tools: Any) -> list[Json] | None:
    return [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools or ()
    ] or None


def _tokens(path: list[Json]) -> Json | None:
    """Return prompt, completion and log-probabilities in tokens; None where they are not recorded for the whole answer."""
    answer = path[-1]
    mask, logprobs = answer.get("mask") or [], answer.get("logprobs") or []
    length = sum(mask)
    if (
        not length
        or len(logprobs) != length
        or len(mask) != len(answer["token_ids"])
        or not all(mask[-length:])
    ):
        return None
    before = [token for node in path[:-1] for token in node.get("token_ids") or ()]
    prompt_ids = [*before, *answer["token_ids"][:-length]]
    if not prompt_ids:
        return None
    return {"prompt_ids": prompt_ids, "token_ids": answer["token_ids"][-length:], "logprobs": logprobs}
