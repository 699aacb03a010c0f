"""Defines the interfaces and data types of episodes.

The service implements `TokenSource` (rollout workers), `TurnLog` (the exchange) and `ConversationHost` (the HTTP server
of agents); this package implements `AgentConversation`. These interfaces never raise faults of the infrastructure:
their implementations retry, if needed with another worker, while the lease is held. When it is lost, they raise
`LeaseLost`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from paceline.errors import PacelineError
from paceline.groups import Completion, FloatArray, IntArray, Rows, VersionSpan
from paceline.v1 import common_pb2
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import TurnArrays


class LeaseLost(PacelineError):
    """Another worker holds the lease, or the run is over. The episodes of the group end, and nothing is submitted."""


class TurnParams(NamedTuple):
    """Sampling parameters of one turn. All other sampling parameters are the run's."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, params: common_pb2.SamplingParams) -> TurnParams:
        """Return the parameters of a lease, which has every field set."""
        given = {name: getattr(params, name) for name in cls._fields}
        return cls(**given)._replace(stop_token_ids=tuple(params.stop_token_ids))

    def proto(self) -> common_pb2.SamplingParams:
        return common_pb2.SamplingParams(**self._asdict())


class TurnRequest(NamedTuple):
    """One turn to sample."""

    prompt_ids: IntArray
    """[P] all tokens that the model reads."""
    params: TurnParams
    seed: int
    """Seed, the same for every request of this turn."""
    conversation: str
    """Name of the sample's conversation. Its requests share a prefix, so one rollout worker should get them all."""


class SampledTurn(NamedTuple):
    """The sampled tokens of one turn."""

    token_ids: IntArray
    """[T] sampled tokens, at least one, including the stop token."""
    logprobs: FloatArray
    """[T] behaviour log-probabilities, in nats."""
    spans: tuple[VersionSpan, ...]
    """Version spans that cover [0, T) without gaps."""
    finish_reason: str
    """`stop` or `length`."""
    text: str
    """Text without the control tokens of the chat."""


class TokenSource(Protocol):
    """Samples turns on rollout workers."""

    async def sample(self, request: TurnRequest) -> SampledTurn:
        """Return the sampled turn. Raises LeaseLost, and InvalidInput (PromptTooLong) if no rollout worker accepts the
        prompt."""


class TurnLog(Protocol):
    """Records a leased group's turns in the ledger. Calls of different samples overlap; those of one sample do not."""

    async def turn(self, sample: int, life: int, index: int, arrays: TurnArrays, note: pb.TurnNote, last: bool) -> None:
        """Record a finished turn and return once the record is committed. Raises LeaseLost."""

    async def end(self, sample: int, life: int, reason: str, error: str, give_up: bool) -> None:
        """Record that a life ends before its sample is finished, and return once the record is committed. `reason` is
        `restarted` or `environment_failed`. Raises LeaseLost."""


@dataclass(frozen=True)
class RecordedSample:
    """The turns that earlier holders of the lease recorded for one sample."""

    life: int = 1
    failures: int = 0
    """Number of lives that a fault of the environment ended."""
    finished: bool = False
    """True if the sample's last turn is recorded, so that only the submission of the group remains."""
    given_up: bool = False
    turns: tuple[tuple[TurnArrays, pb.TurnNote], ...] = ()
    """Turns of the sample's current life, in order."""


@dataclass(frozen=True)
class EpisodeLease:
    """A leased group, for which episodes are run."""

    group_id: int
    attempt: int
    prompt: Any
    """Text or chat messages, as in the data set."""
    columns: Mapping[str, Any]
    """The other columns of the data set."""
    num_samples: int
    seed: int
    params: TurnParams
    recorded: Mapping[int, RecordedSample] = field(default_factory=dict)
    """Maps the index of a sample to the sample's recorded turns. A sample without recorded turns is missing."""


class FinishedGroup(NamedTuple):
    """A finished group, ready for `paceline.wire.encode_result`."""

    prompt_ids: IntArray
    """[P] prompt tokens of the first transcript; empty if there is none."""
    completions: list[Completion]
    """R transcripts in the order of their samples. If every sample was given up, the list is empty, and nothing is
    submitted."""
    rows: Rows
    samples: list[pb.SampleText]
    """[C] texts of the samples."""


class AgentRequest(NamedTuple):
    """A request of an agent's program, parsed by the HTTP server: messages with tools, or token ids."""

    messages: Sequence[Mapping[str, Any]]
    """OpenAI messages as they were sent; empty if `prompt_ids` is set."""
    tools: Sequence[dict[str, Any]]
    """Schemas of the tools in OpenAI's format."""
    template_kwargs: Mapping[str, Any]
    """Arguments of the chat template in addition to those of the spec."""
    prompt_ids: IntArray | None
    """[P] token ids instead of messages."""
    max_new_tokens: int | None
    """The request's limit on new tokens; None for the run's. Other sampling parameters are always the run's, because
    the learner's log-probabilities assume them."""
    body_digest: str
    """XXH3-128 digest of the request's body."""
    retry_count: int
    """Value of the header `x-stainless-retry-count` of OpenAI's clients; 0 without it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the turn, in addition to those of the run and the model."""


class AgentAnswer(NamedTuple):
    """The answer to an agent's request."""

    prompt_ids: IntArray
    """[P] tokens that the model read before the answer."""
    turn: SampledTurn
    message: Mapping[str, Any]
    """The assistant's message in OpenAI's format: `role`, `content` (None beside tool calls), and if present
    `tool_calls` with their ids and `reasoning_content`."""


class AgentConversation(Protocol):
    """The conversation of one sample, as the HTTP server uses it."""

    async def answer(self, request: AgentRequest) -> AgentAnswer:
        """Sample and record one turn. Requests of one conversation may overlap. Raises LeaseLost, InvalidInput (HTTP
        status 400), and Conflict (status 409) if the episode is over because of a limit or the end of its program."""


class ConversationAddress(NamedTuple):
    """The address for the requests of an agent's program."""

    base_url: str
    """Base URL for OpenAI's clients, ending in `/v1`."""
    api_key: str
    """Secret that identifies the conversation."""


class ConversationHost(Protocol):
    """The HTTP server of agents' requests."""

    def open(self, conversation: AgentConversation) -> AbstractAsyncContextManager[ConversationAddress]:
        """Serve a conversation at its own address while the context is open; at its end cancel the requests that still
        run."""


class EpisodeFault(PacelineError):
    """A fault of an episode. Faults of the infrastructure are never reported as the environment's."""


class EnvironmentFailed(EpisodeFault):
    """User code raised, hung, exceeded a limit or returned an invalid value. The life ends and counts as a failure."""


class EnvironmentLost(EpisodeFault):
    """The instance was lost for a reason outside of it, such as the death of its process in another episode's call. The
    episode is replayed, restored or restarted, and the loss does not count as a failure."""


class ServiceAway(EnvironmentLost):
    """User code could not reach a service. The episode continues after a pause; this does not count as a failure."""


class CannotGoOn(EnvironmentLost):
    """This life already has turns, and can be neither replayed nor restored. The episode begins again; this does not
    count as a failure."""


class TimeIsUp(EpisodeFault):
    """The time of the episode was up during a call. The episode ends with the turns that it has."""
