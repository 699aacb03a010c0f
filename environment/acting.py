"""What an environment answers to a turn: its messages, its reward, and whether the episode is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.chat.messages import Json
from paceline.environment.hosting.pool import Instance
from paceline.environment.limits import Stopwatch, cut_to_tokens
from paceline.environment.notes import clean, digest
from paceline.environment.protocols import SampledTurn
from paceline.environment.rendering.protocol import Parsed, Rendering
from paceline.environment.setting import EpisodeSetting


class Acted(NamedTuple):
    """The environment's answer to a turn."""

    messages: Sequence[Json]
    done: bool
    reward: float | None = None
    state: str = ""
    """By the class' `save`, where it has one."""

    @property
    def digest(self) -> str:
        """Return the digest by which a replay is compared with the record."""
        return digest([list(self.messages), self.done, self.reward])


async def act(
    setting: EpisodeSetting,
    rendering: Rendering,
    instance: Instance,
    watch: Stopwatch,
    parsed: Parsed,
    answer: Json,
    turn: SampledTurn,
) -> Acted:
    """Give a turn to the environment: its calls to the tools, or its text to `step`. Raises EpisodeFault."""
    if instance.facts.steps:
        with watch.running():
            step, state = await instance.step(turn.text, watch.left_s)
        messages = [_observation("user", step["observation"], setting)] if step["observation"] else []
        return Acted(messages, step["done"] or not messages, step["reward"], state)
    if not parsed.calls:
        faults = [] if turn.finish_reason == "length" else list(parsed.faults)
        setting.counts.tool_errors += len(faults)
        return Acted([rendering.fault_message(clean("; ".join(faults)))] if faults else [], not faults)
    calls = [(call.name, call.arguments) for call in parsed.calls]
    with watch.running():
        results, state = await instance.tools(calls, watch.left_s)
    setting.counts.tool_calls += len(calls)
    setting.counts.tool_errors += sum(1 for result in results if result.get("raised")) + len(parsed.faults)
    messages = [
        {**_observation("tool", result["result"], setting), "name": call.name, "tool_call_id": asked["id"]}
        for call, asked, result in zip(parsed.calls, answer["tool_calls"], results, strict=True)
    ]
    if parsed.faults:
        fault = rendering.fault_message(clean("; ".join(parsed.faults)))["content"]
        messages[-1]["content"] += f"\n\n{fault}"
    return Acted(messages, False, None, state)


def _observation(role: str, text: str, setting: EpisodeSetting) -> Json:
    content = cut_to_tokens(clean(text), setting.environment.max_tool_tokens, setting.tokenizer)
    return {"role": role, "content": content}
