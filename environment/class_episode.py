"""Runs an episode of a user's class: samples a turn, lets the environment answer, and records both.

A turn is recorded with the environment's answer, so an episode may continue after any recorded turn. To continue, the
recorded calls are run again if the class is deterministic, and every answer must have the recorded digest. Otherwise
the saved state is restored; without a saved state the life ends as `restarted`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.chat.messages import Json
from paceline.environment.hosting.pool import Instance, SampleDeaths
from paceline.environment.life import FinishedSample, Life, clean, digest, json_text, rewards_of, sample_text
from paceline.environment.protocols import CannotGoOn, EnvironmentFailed, SampledTurn, TimeIsUp, TurnRequest
from paceline.environment.rendering.protocol import Conversation, Parsed, Rendering
from paceline.environment.setting import EpisodeSetting, GroupContext, Stopwatch, cut_to_tokens
from paceline.environment.transcripts import TranscriptTokens
from paceline.errors import InvalidInput, PromptTooLong
from paceline.groups import IntArray
from paceline.v1 import exchange_pb2 as pb

NAME_COLUMN = "environment"
"""Column that names a row's class, for a spec with several classes."""


class ClassEpisode:
    def __init__(self, context: GroupContext, life: Life, deaths: SampleDeaths):
        self._context, self._setting, self._life, self._deaths = context, context.setting, life, deaths
        self._watch = Stopwatch(self._setting.environment.timeout_s)
        self._rendering, conversation = self._setting.renderings.begin(context.lease.prompt)
        self._conversation: Conversation = conversation
        self._reset_text: str | None = None
        self._prompt_ids: IntArray = np.empty(0, np.int32)
        """[P] tokens that the model reads next."""
        self._instance: Instance | None = None

    async def run(self) -> FinishedSample:
        """Return the finished sample. Raises EpisodeFault, InvalidInput (PromptTooLong), LeaseLost."""
        try:
            instance = await (self._go_on() if self._life.turns else self._begin())
            while not await self._take_turn(instance):
                pass
            return self._life.finished()
        finally:
            if self._instance is not None:
                self._instance.close()

    # Begin

    async def _begin(self) -> Instance:
        columns = self._context.row
        name = self._name()
        if name:
            columns.pop(NAME_COLUMN, None)
        with self._watch.running():
            instance, text = await self._context.code.open(name, columns, self._watch.left_s, self._deaths)
        self._instance = instance
        self._show_prompt(instance, text)
        self._prompt_ids = self._rendering.prompt(self._conversation)
        if self._setting.room(len(self._prompt_ids)) < 1:
            raise PromptTooLong(self._setting.no_room(len(self._prompt_ids)))
        return instance

    def _name(self) -> str:
        classes = self._setting.environment.classes
        if "" in classes:
            return ""
        name = self._context.lease.columns.get(NAME_COLUMN)
        if not isinstance(name, str) or name not in classes:
            raise InvalidInput(
                f"the column {NAME_COLUMN!r} is {name!r:.60}, but environment.class has only {', '.join(map(repr, classes))}"
            )
        return name

    def _show_prompt(self, instance: Instance, text: str | None) -> None:
        """Append the text of `reset` to the last message, as TRL does; if the last message is the system's, or if there
        is none, add a user message with the text. Add the tools."""
        self._reset_text = text
        messages = list(self._conversation.messages)
        if text and messages and messages[-1]["role"] != "system":
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content'] or ''}{clean(text)}"}
        elif text:
            messages.append({"role": "user", "content": clean(text)})
        self._conversation = Conversation(messages, instance.facts.tools)

    # Turns

    async def _take_turn(self, instance: Instance) -> bool:
        """Sample a turn, let the environment answer, and record both; return whether it was the last turn."""
        life, setting = self._life, self._setting
        continuation = life.transcripts.continuation(self._prompt_ids)
        number, prompt_ids = len(life.turns), self._prompt_ids
        seed = life.seed(self._context.lease.seed, number)
        params = self._context.params(setting.room(len(prompt_ids)))
        turn = await self._context.source.sample(
            TurnRequest(prompt_ids, params, seed, self._context.conversation(life.sample))
        )
        parsed = self._rendering.parse(self._conversation, prompt_ids, turn)
        answer = parsed.message(f"call_{number}")
        over = ""
        try:
            acted = await act(setting, self._rendering, instance, self._watch, parsed, answer, turn)
        except TimeIsUp as error:
            acted, over = Acted([], done=True), f"{error} (environment.timeout_s {self._watch.limit_s:g})"
        note = pb.TurnNote(
            messages_json=json_text([answer, *acted.messages]),
            text=clean(turn.text),
            finish_reason=turn.finish_reason,
            observation_digest=acted.digest,
        )
        if acted.reward is not None:
            note.reward = acted.reward
        limit = over or self._limit_of(number, acted, turn) or self._extend(turn, answer, acted.messages, acted.done)
        if last := bool(limit) or acted.done:
            reward = None if over else await self._reward(instance)
            note.sample.CopyFrom(self._text(note, limit, reward, instance))
        elif acted.state and not (instance.facts.deterministic or setting.environment.deterministic):
            note.state = json_text([self._reset_text, acted.state]).encode()
        await life.add(continuation, turn, note, last=last)
        return last

    def _limit_of(self, number: int, acted: Acted, turn: SampledTurn) -> str:
        environment = self._setting.environment
        if acted.done:
            steps = self._instance is not None and self._instance.facts.steps
            if turn.finish_reason == "length" and not steps:
                return f"the last turn reached its limit of {len(turn.token_ids)} tokens"
            return ""
        if number + 1 >= environment.max_turns:
            return f"environment.max_turns {environment.max_turns}"
        if self._watch.left_s <= 0:
            return f"environment.timeout_s {environment.timeout_s:g}"
        return ""

    def _extend(self, turn: SampledTurn, answer: Json, new: Sequence[Json], done: bool) -> str:
        """Add a turn and the messages that follow it to the conversation, and set the next prompt. Return the limit
        that is exceeded, or an empty string."""
        before = self._conversation
        self._conversation = before.extended([answer, *new])
        if done:
            return ""
        bridge = self._rendering.bridge(before, self._prompt_ids, turn, answer, new)
        if bridge is None:
            self._setting.counts.bridge_breaks += 1
            self._prompt_ids = self._rendering.prompt(self._conversation)
        else:
            self._prompt_ids = np.concatenate([self._prompt_ids, turn.token_ids, bridge])
        num_tokens = len(self._prompt_ids)
        return self._setting.no_room(num_tokens) if self._setting.room(num_tokens) < 1 else ""

    async def _reward(self, instance: Instance) -> float | None:
        with self._watch.running():
            return await instance.reward(self._setting.environment.call_timeout_s)

    def _text(self, note: pb.TurnNote, limit: str, reward: float | None, instance: Instance) -> pb.SampleText:
        turn_rewards = rewards_of([*(earlier for _, earlier in self._life.turns), note])
        added = [json.loads(earlier.messages_json) for _, earlier in self._life.turns]
        messages = [message for each in [*added, json.loads(note.messages_json)] for message in each]
        shown = self._conversation.messages[: len(self._conversation.messages) - len(messages)]
        if instance.facts.steps and reward is None:
            reward = turn_rewards
        return sample_text(
            messages,
            "truncated" if limit else "done",
            limit,
            reward,
            turn_rewards,
            self._prompt_shown(shown),
            instance.facts.tools,
        )

    def _prompt_shown(self, messages: Sequence[Json]) -> Any:
        """Return the prompt with the text of `reset`, in the data set's form; None if `reset` returned no text."""
        if not self._reset_text:
            return None
        if isinstance(self._context.lease.prompt, str):
            return messages[0]["content"] if messages else self._reset_text
        return list(messages)

    # Continue

    async def _go_on(self) -> Instance:
        """Continue behind the recorded turns. Raises CannotGoOn."""
        facts = self._context.code.classes[self._name()]
        why = "the environment's class is not deterministic, and it has no `save` and `load`"
        if facts.deterministic or self._setting.environment.deterministic:
            try:
                instance = await self._replay()
            except (EnvironmentFailed, TimeIsUp) as error:
                why = f"the replay failed: {error}"
            else:
                self._setting.counts.replayed += 1
                return instance
            if self._instance is not None:
                self._instance.close()
        if facts.saves and self._life.turns[-1][1].state:
            instance = await self._restore(self._life.turns[-1][1].state)
            self._setting.counts.restored += 1
            return instance
        raise CannotGoOn(why)

    async def _replay(self) -> Instance:
        """Run the recorded calls again. Raises EnvironmentFailed if an answer differs from the recorded one."""
        _, self._conversation = self._setting.renderings.begin(self._context.lease.prompt)
        self._watch = Stopwatch(self._setting.environment.timeout_s)
        instance = await self._begin()
        transcripts = TranscriptTokens()
        for number, (arrays, note) in enumerate(self._life.turns):
            if number == 0 and not np.array_equal(arrays.context_ids, self._prompt_ids):
                raise EnvironmentFailed("`reset` returned another prompt than the recorded one")
            self._prompt_ids = transcripts.prompt_of(arrays)
            transcripts.add(arrays)
            turn = SampledTurn(arrays.token_ids, arrays.logprobs, arrays.spans, note.finish_reason, note.text)
            parsed = self._rendering.parse(self._conversation, self._prompt_ids, turn)
            answer = parsed.message(f"call_{number}")
            acted = await act(self._setting, self._rendering, instance, self._watch, parsed, answer, turn)
            if acted.digest != note.observation_digest:
                raise EnvironmentFailed(f"the environment answered turn {number} differently than recorded")
            self._extend(turn, answer, acted.messages, acted.done)
        return instance

    async def _restore(self, state: bytes) -> Instance:
        """Load the saved state. Raises EnvironmentLost, EnvironmentFailed."""
        reset_text, saved = json.loads(state)
        _, self._conversation = self._setting.renderings.begin(self._context.lease.prompt)
        self._watch = Stopwatch(self._setting.environment.timeout_s)
        try:
            with self._watch.running():
                instance = await self._context.code.restore(self._name(), saved, self._watch.left_s, self._deaths)
        except (EnvironmentFailed, TimeIsUp) as error:
            raise CannotGoOn(f"the saved state could not be loaded: {error}") from None
        self._instance = instance
        self._show_prompt(instance, reset_text)
        transcripts = TranscriptTokens()
        for arrays, note in self._life.turns:
            self._prompt_ids = transcripts.prompt_of(arrays)
            transcripts.add(arrays)
            answer, *new = json.loads(note.messages_json)
            turn = SampledTurn(arrays.token_ids, arrays.logprobs, arrays.spans, note.finish_reason, note.text)
            self._extend(turn, answer, new, done=False)
        return instance


class Acted(NamedTuple):
    messages: Sequence[Json]
    done: bool
    reward: float | None = None
    state: str = ""
    """State from `save`, as text; empty if there is none."""

    @property
    def digest(self) -> str:
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
    """Pass a turn to the environment: its calls to the tools, or its text to `step`. Raises EpisodeFault."""
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
    setting.counts.tool_errors += sum(1 for result in results if result.get("raised")) + len(parsed.faults)
    messages = [
        {**_observation("tool", result["result"], setting), "name": call.name, "tool_call_id": made["id"]}
        for call, made, result in zip(parsed.calls, answer["tool_calls"], results, strict=True)
    ]
    if parsed.faults:
        fault = rendering.fault_message(clean("; ".join(parsed.faults)))["content"]
        messages[-1]["content"] += f"\n\n{fault}"
    return Acted(messages, False, None, state)


def _observation(role: str, text: str, setting: EpisodeSetting) -> Json:
    content = cut_to_tokens(clean(text), setting.environment.max_tool_tokens, setting.tokenizer)
    return {"role": role, "content": content}
