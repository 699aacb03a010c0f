"""A world for episodes without services: a tokenizer with merges, a scripted source of tokens, a turn log in memory, and user code
in this process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from paceline.environment.episodes import run_episodes
from paceline.environment.hosting.classes import ClassFacts, facts_of
from paceline.environment.hosting.worker import (
    accepted,
    decode_state,
    encode_state,
    step_of,
    text_of_reset,
    text_of_tool,
)
from paceline.environment.protocols import (
    ConversationHost,
    EnvironmentFailed,
    EpisodeLease,
    FinishedGroup,
    LeaseLost,
    RecordedSample,
    SampledTurn,
    TurnParams,
    TurnRequest,
)
from paceline.environment.setting import EpisodeSetting
from paceline.groups import IntArray, VersionSpan
from paceline.spec import RunSpec
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import TurnArrays

HERMES = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ m.content }}
{%- for call in m.tool_calls or [] %}{% if m.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The form of Qwen 2.5 and Hermes."""

FORGETFUL = HERMES.replace(
    "{{ m.content }}\n{%- for call", "{% if loop.last %}{{ m.content }}{% else %}…{% endif %}\n{%- for call"
)
"""Writes the text of the last answer only, so that no conversation extends its beginning."""

WORDS = (
    "add the numbers and tell me what 3 plus 14 is, please: tool call name arguments result error user assistant system "
    'expression value {"name": "add", "arguments": {"a": 15, "b": 92}} Calculating. The answer is 107.\n'
) * 4


def merged_tokenizer(template: str | None = HERMES) -> Any:
    """A byte-level BPE tokenizer with merges, made on the spot: one text has many spellings in its tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ("<tool_call>", "</tool_call>")])
    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    )


def spelled(text: str, tokenizer: Any, dice: random.Random) -> list[int]:
    """The ids of a text in one of its many spellings, as a model may sample it: encoded in pieces."""
    ids: list[int] = []
    while text:
        size = dice.randint(1, 9)
        mark = next((m for m in tokenizer.get_added_vocab() if text.startswith(m)), None)
        piece = mark or text[:size]
        if mark is None and "<" in piece[1:]:
            piece = piece[: piece.index("<", 1)]
        ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
        text = text[len(piece) :]
    return ids


Say = Callable[[TurnRequest, int], tuple[list[int], str]]
"""What the policy samples for a request, the n-th of its conversation: token ids and a finish reason."""


@dataclass
class ScriptedSource:
    """A source of tokens by a script. It keeps every request with its answer."""

    say: Say
    tokenizer: Any
    asked: list[tuple[TurnRequest, SampledTurn]] = field(default_factory=list)
    before: Callable[[TurnRequest], Any] | None = None
    """Awaited before each answer."""
    _counts: dict[str, int] = field(default_factory=dict)

    async def sample(self, request: TurnRequest) -> SampledTurn:
        if self.before is not None:
            await self.before(request)
        number = self._counts.get(request.conversation, 0)
        self._counts[request.conversation] = number + 1
        ids, reason = self.say(request, number)
        if len(ids) > request.params.max_new_tokens:
            ids, reason = ids[: request.params.max_new_tokens], "length"
        dice = random.Random(request.seed)
        turn = SampledTurn(
            np.array(ids, np.int32),
            np.array([-dice.random() for _ in ids], np.float32),
            (VersionSpan(1, number, 0, len(ids)),),
            reason,
            self.tokenizer.decode(ids, skip_special_tokens=True),
        )
        self.asked.append((request, turn))
        return turn


@dataclass
class MemoryTurnLog:
    """A turn log as the exchange keeps it, which checks the order of turns. `fail_at` loses the lease at that record."""

    samples: dict[int, RecordedSample] = field(default_factory=dict)
    ended: list[tuple[int, int, str, str, bool]] = field(default_factory=list)
    fail_at: int | None = None
    num_records: int = 0
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a sample is finished."""

    async def turn(self, sample: int, life: int, index: int, arrays: TurnArrays, note: pb.TurnNote, last: bool) -> None:
        self._count()
        before = self.samples.get(sample, RecordedSample())
        assert (life, index) == (before.life, len(before.turns))
        assert not before.finished
        assert note.HasField("sample") == last
        kept = (TurnArrays.decode(arrays.encode()), pb.TurnNote.FromString(note.SerializeToString()))
        self.samples[sample] = before_with(before, kept, last)
        if last:
            self.finished.set()

    async def end(self, sample: int, life: int, reason: str, error: str, give_up: bool) -> None:
        self._count()
        before = self.samples.get(sample, RecordedSample())
        assert life == before.life
        self.ended.append((sample, life, reason, error, give_up))
        failures = before.failures + (reason == "environment_failed")
        self.samples[sample] = RecordedSample(life + (not give_up), failures, False, give_up)

    def _count(self) -> None:
        self.num_records += 1
        if self.fail_at is not None and self.num_records > self.fail_at:
            raise LeaseLost("another worker holds the lease")


def before_with(before: RecordedSample, kept: tuple[TurnArrays, pb.TurnNote], last: bool) -> RecordedSample:
    return RecordedSample(before.life, before.failures, last, False, (*before.turns, kept))


class LocalInstance:
    """An instance of a class in this process."""

    def __init__(self, code: LocalCode, name: str, environment: Any):
        self.facts, self._code, self._environment = code.classes[name], code, environment
        self._open = True

    async def tools(self, calls: Sequence[tuple[str, Any]], time_left_s: float) -> tuple[list[dict[str, Any]], str]:
        self._code.num_calls += len(calls)
        results = []
        for name, arguments in calls:
            try:
                results.append({"result": text_of_tool(getattr(self._environment, name)(**arguments))})
            except Exception as error:
                results.append({"result": text_of_tool({"error": str(error)}), "raised": True})
        return results, self._state()

    async def step(self, text: str, time_left_s: float) -> tuple[dict[str, Any], str]:
        self._code.num_calls += 1
        try:
            return step_of(self._environment.step(text))._asdict(), self._state()
        except Exception as error:
            raise EnvironmentFailed(str(error)) from None

    async def reward(self, time_left_s: float) -> float | None:
        return self._environment.get_reward() if self.facts.rewards else None

    def close(self) -> None:
        self._code.num_open -= self._open
        self._open = False

    def _state(self) -> str:
        return encode_state(self._environment.save()) if self.facts.saves else ""


class LocalCode:
    """User code in this process: `UserCode` without its processes."""

    def __init__(self, classes: Mapping[str, type]):
        self._classes = classes
        self.classes: dict[str, ClassFacts] = {name: facts_of(cls) for name, cls in classes.items()}
        self.num_open = self.num_calls = 0

    async def open(self, name: str, columns: Mapping[str, Any], time_left_s: float, deaths: Any) -> Any:
        environment = self._classes[name]()
        text = text_of_reset(environment.reset(**accepted(environment.reset, dict(columns))))
        self.num_open += 1
        return LocalInstance(self, name, environment), text

    async def restore(self, name: str, state: str, time_left_s: float, deaths: Any) -> Any:
        environment = self._classes[name]()
        self.num_open += 1
        environment.load(decode_state(state))
        return LocalInstance(self, name, environment)


def run_spec(**changes: Any) -> RunSpec:
    """A spec with an environment; `changes` by dotted section."""
    sections: dict[str, Any] = {
        "name": "episodes",
        "data": {"train": "rows.jsonl"},
        "policy": {
            "model_name": "made",
            "max_total_sequence_length": 4096,
            "generation": {"max_new_tokens": 512},
        },
        "environment": {"class": "code.py:Class"},
        "rewards": [{"function": "length"}],
    }
    for name, value in changes.items():
        sections[name] = {**sections.get(name, {}), **value} if isinstance(value, dict) else value
    return RunSpec.model_validate(sections)


def lease(prompt: Any = "", num_samples: int = 1, **changes: Any) -> EpisodeLease:
    """A leased group."""
    fields: dict[str, Any] = {
        "group_id": 7,
        "attempt": 1,
        "prompt": prompt,
        "columns": {},
        "num_samples": num_samples,
        "seed": 11,
        "params": TurnParams(512),
    }
    return EpisodeLease(**{**fields, **changes})


async def run_group(
    setting: EpisodeSetting,
    source: Any,
    code: Any,
    leased: EpisodeLease,
    turn_log: MemoryTurnLog | None = None,
    conversations: ConversationHost | None = None,
) -> FinishedGroup:
    """Run a group's episodes on its turn log."""
    turn_log = turn_log or MemoryTurnLog(dict(leased.recorded))
    return await run_episodes(setting, leased, source, turn_log, code, conversations)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def ids_of(text: str, tokenizer: Any, end: bool = True) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id] if end else ids


def row_tokens(completion: Any) -> IntArray:
    return np.concatenate([completion.prompt_ids, completion.token_ids])
