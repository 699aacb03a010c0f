"""`POST /inference/v1/generate`: token ids in, token ids out, as in vLLM, for clients that render chats themselves. The
request is `{model, token_ids, sampling_params}`; each token of the answer has its log-probability, also under the
name `token_id:N`, which such clients check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from paceline.chat.messages import Json, Unsupported
from paceline.groups import Version
from paceline.services.openai.frames import Choice, Delta, Event, Frame, model_name, ranges, usage
from paceline.services.openai.requests import Ask, Ids

NOT_IN_ANSWERS = ("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "routed_experts_prompt_start")
"""Ignored fields of sampling_params: they concern text or routes of experts, which the answer does not have."""


class TokenAsk(Ask):
    """Request of `POST /inference/v1/generate`; `sampling_params` are read like the fields of the other routes."""

    model: str = ""
    """Model: `<run>` or `<run>@<version>`; empty for the served run."""
    token_ids: Annotated[Ids, Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """0 and 1 both return the log-probabilities of the sampled tokens only."""
    request_id: str | None = None
    output_mode: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            raise Unsupported(f"sampling_params must be an object, not {sampling!r:.60}", "sampling_params")
        rest = {name: value for name, value in body.items() if name != "sampling_params"}
        if both := sorted(rest.keys() & sampling.keys()):
            raise Unsupported(
                f"{both[0]} is given outside sampling_params too; keep only the value in sampling_params", both[0]
            )
        return {**rest, **{name: value for name, value in sampling.items() if name not in NOT_IN_ANSWERS}}

    @model_validator(mode="after")
    def _check_tokens(self) -> TokenAsk:
        if self.output_mode not in (None, "tokens"):
            raise Unsupported(f"output_mode is {self.output_mode!r}; only 'tokens' is supported", "output_mode")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class TokenAnswer(Frame):
    """The answer of `/inference/v1/generate`."""

    def __init__(self, answer_id: str, ask: TokenAsk, run_id: str, at_first: Version) -> None:
        super().__init__(ask.request_id or answer_id, run_id, at_first)
        self._ask = ask
        self._newest: tuple[int, int] = (at_first.session, at_first.step)

    def whole(self, choices: Sequence[Choice]) -> Json:
        entries = [
            self._entry(choice) | {"finish_reason": choice.finish_reason, "versions": ranges(choice.spans)}
            for choice in choices
        ]
        more: Json = {"usage": usage(choices)}
        if self._ask.return_token_ids:
            more["prompt_token_ids"] = self._ask.token_ids
        return self._frame(entries) | more

    def add(self, delta: Delta) -> list[Event]:
        return [Event(self._frame([self._entry(delta)]))]

    def end(self, choice: Choice) -> list[Event]:
        entry = {"index": choice.index, "token_ids": [], "logprobs": None, "stop_reason": None}
        closing = {"finish_reason": choice.finish_reason, "versions": ranges(choice.spans)}
        return [Event(self._frame([entry | closing]))]

    def finish(self, choices: Sequence[Choice]) -> list[Event]:
        return [Event(self._frame([]) | {"usage": usage(choices)})] if self._ask.include_usage else []

    def _entry(self, part: Choice | Delta) -> Json:
        self._newest = max([self._newest, *((span.session, span.step) for span in part.spans)])
        logprobs: list[Json] = [
            {
                "token": f"token_id:{token_id}",
                "token_id": token_id,
                "logprob": logprob,
                "bytes": None,
                "top_logprobs": [],
            }
            for token_id, logprob in zip(part.token_ids, part.logprobs, strict=True)
        ]
        return {
            "index": part.index,
            "token_ids": list(part.token_ids),
            "logprobs": {"content": logprobs} if self._ask.wants_logprobs else None,
            "finish_reason": None,
            "stop_reason": None,
        }

    def _frame(self, choices: list[Json]) -> Json:
        return {
            "request_id": self._id,
            "model": model_name(self._run_id, self._newest),
            "created": self._created_s,
            "output_mode": "tokens",
            "choices": choices,
        }
