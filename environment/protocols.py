"""What an episode needs from outside, and what a leased group and its result are.

The service implements `TokenSource` (rollout workers), `Journal` (the exchange) and `SessionHost` (the HTTP server of
agents); this package implements `AgentSession`. Faults of the infrastructure never come through these interfaces: their
implementations try again, elsewhere if need be, for as long as the lease is held, and raise `LeaseLost` once it is not.
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
    """Another worker holds the lease, or the run is over: the episodes of the group end, and nothing is submitted."""


class TurnParams(NamedTuple):
    """Sampling parameters of one turn; those that have no field here are the run's."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, params: common_pb2.SamplingParams) -> TurnParams:
        """Return the parameters of a lease, in which every field is set."""
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
    """Seed of the sampling, the same whenever the turn is asked for again."""
    session: str
    """Name of the sample's session: its requests share a prefix, so one engine should get them all."""


class SampledTurn(NamedTuple):
    """The tokens of one turn."""

    token_ids: IntArray
    """[T] sampled tokens, at least one, the stop token included."""
    logprobs: FloatArray
    """[T] behaviour log-probabilities, in nats."""
    spans: tuple[VersionSpan, ...]
    """Cover [0, T) without gaps."""
    finish_reason: str
    """`stop` or `length`."""
    text: str
    """Text without the marks of the chat."""


class TokenSource(Protocol):
    """Rollout workers, as an episode sees them."""

    async def sample(self, request: TurnRequest) -> SampledTurn:
        """Return the turn. Raises InvalidInput (PromptTooLong) for a prompt that no engine takes, LeaseLost."""


class Journal(Protocol):
    """The exchange's record of the group's turns. Calls of different samples overlap; those of one sample do not."""

    async def turn(self, sample: int, life: int, index: int, arrays: TurnArrays, note: pb.TurnNote, last: bool) -> None:
        """Record a finished turn; return when it is committed. Raises LeaseLost."""

    async def end(self, sample: int, life: int, reason: str, error: str, give_up: bool) -> None:
        """Record that a life of a sample ends before the sample is finished; return when it is committed. `reason` is
        `restarted` or `environment_failed`. Raises LeaseLost."""


@dataclass(frozen=True)
class SampleJournal:
    """What earlier holders of the lease have recorded of one sample."""

    life: int = 1
    failures: int = 0
    """Lives that ended by a fault of the environment."""
    finished: bool = False
    """The last turn is on record: the sample is only submitted with its group."""
    given_up: bool = False
    turns: tuple[tuple[TurnArrays, pb.TurnNote], ...] = ()
    """The turns of this life, in order."""


@dataclass(frozen=True)
class EpisodeLease:
    """A leased group: what its episodes begin with."""

    group_id: int
    attempt: int
    prompt: Any
    """As the data set has it: text or chat messages."""
    columns: Mapping[str, Any]
    """The data set's other columns."""
    num_samples: int
    seed: int
    params: TurnParams
    journal: Mapping[int, SampleJournal] = field(default_factory=dict)
    """By sample; a sample without a record is missing."""


class GroupRows(NamedTuple):
    """A finished group, in the form of `paceline.wire.encode_result`."""

    prompt_ids: IntArray
    """[P] prompt of the first row; empty without rows."""
    completions: list[Completion]
    """R rows in the order of their samples. None at all where every sample was given up: such a group is not submitted."""
    rows: Rows
    samples: list[pb.SampleText]
    """C, one for each sample."""


class AgentRequest(NamedTuple):
    """A request of an agent's program, read by the HTTP server: messages with tools, or token ids."""

    messages: Sequence[Mapping[str, Any]]
    """OpenAI messages as they were sent; empty for a request with `prompt_ids`."""
    tools: Sequence[dict[str, Any]]
    """Schemas of the tools, as OpenAI's API has them."""
    template_kwargs: Mapping[str, Any]
    """Arguments of the chat template besides those of the spec."""
    prompt_ids: IntArray | None
    """[P] token ids of a request that has them in place of messages."""
    max_new_tokens: int | None
    """The request's limit; None: the run's. Other sampling parameters are the run's, because the learner's
    log-probabilities are of those."""
    body_digest: str
    """XXH3-128 over the body as it was sent."""
    retry_count: int
    """Header `x-stainless-retry-count` of OpenAI's clients; 0 without it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the turn, besides those of the run and the model."""


class AgentAnswer(NamedTuple):
    """The answer to an agent's request."""

    prompt_ids: IntArray
    """[P] tokens that the model has read."""
    turn: SampledTurn
    message: Mapping[str, Any]
    """The assistant's message as OpenAI's API has it: `role`, `content` (None beside tool calls), `tool_calls` with their ids
    and `reasoning_content` where there are any."""


class AgentSession(Protocol):
    """One sample of one group, as the HTTP server sees it."""

    async def answer(self, request: AgentRequest) -> AgentAnswer:
        """Sample and record one turn. Requests of one session may overlap. Raises InvalidInput: answered with status 400;
        Conflict: the episode is over (a limit, its program has ended), answered with status 409; LeaseLost."""


class SessionAddress(NamedTuple):
    """Where an agent's program sends its requests."""

    base_url: str
    """As OpenAI's clients take it: it ends in `/v1`."""
    api_key: str
    """Names the session; nobody else knows it."""


class SessionHost(Protocol):
    """The HTTP server of agents' requests."""

    def open(self, session: AgentSession) -> AbstractAsyncContextManager[SessionAddress]:
        """Serve a session under an address of its own while the context is open. Requests that still run at its end are
        cancelled."""


class EpisodeFault(PacelineError):
    """A fault of an episode; one of the infrastructure is never the environment's."""


class EnvironmentFailed(EpisodeFault):
    """User code raised, hung, broke its limits or returned nonsense: the life ends and is counted."""


class EnvironmentLost(EpisodeFault):
    """The instance is gone by no fault of its own, as its process died with another's call: replayed, restored or restarted,
    uncounted."""


class ServiceAway(EnvironmentLost):
    """User code could not reach a service that it needs: again later, uncounted."""


class CannotGoOn(EnvironmentLost):
    """The life has turns, and its environment can be neither replayed nor restored: it ends as restarted, uncounted."""


class TimeIsUp(EpisodeFault):
    """The seconds of the episode are over in the middle of a call: it ends as it is."""
