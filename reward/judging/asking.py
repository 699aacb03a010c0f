"""Asks a judge all questions of a group, each as often as there are votes.

Tasks: one for each vote of each question; equal questions share one request. The deadline ends all of them; the cache
keeps their answers for another attempt at the group. A request that fails after all its attempts ends the other tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from paceline.rate_limited_log import RateLimitedLog
from paceline.reward.endpoints.cache import AnswerCache, digest_of
from paceline.reward.endpoints.client import BadAnswer, Count, Endpoint, EndpointUnavailable, RequestRefused
from paceline.reward.judging.settings import JudgeSettings
from paceline.reward.judging.verdicts import Verdict

log = logging.getLogger(__name__)
seldom = RateLimitedLog(log)

Messages = list[dict[str, str]]
Parse = Callable[[str], Verdict | None]

REASKED_SEED = 1_000_003
"""Number that is added to the seed when a vote is retried, because the same seed may give the same answer."""
_without_schema: set[tuple[str, str]] = set()


class NoVerdict(RuntimeError):
    """Too few answers of the judge have a verdict, and the spec does not allow None."""


class Panel:
    def __init__(
        self,
        settings: JudgeSettings,
        endpoint: Endpoint,
        cache: AnswerCache | None,
        count: Count,
        verdict: dict[str, Any],
    ) -> None:
        """`verdict` maps the name of the verdict's field to its JSON schema."""
        self._settings, self._endpoint, self._count = settings, endpoint, count
        self._cache = cache if settings.endpoint.cache else None
        self._schema = {
            "type": "object",
            "properties": {"reasoning": {"type": "string"}, **verdict},
            "required": ["reasoning", *verdict],
            "additionalProperties": False,
        }
        self._running: dict[str, asyncio.Future[str]] = {}
        """Maps the digest of a question to its unanswered request."""
        self._refusal = ""

    async def votes(self, questions: Sequence[Messages], parse: Parse, deadline_s: float) -> list[list[Verdict]]:
        """Return, for each question, the verdicts that arrived before the deadline.

        Raises EndpointUnavailable if the service gave no answer in time (unless `when_unavailable` is none), and
        RequestRefused if it refused every question.
        """
        found: list[list[Verdict]] = [[] for _ in questions]
        missing = len(questions) * self._settings.votes

        async def ask(index: int, vote: int) -> None:
            nonlocal missing
            verdict = await self._verdict(questions[index], parse, self._settings.seed + vote)
            missing -= 1
            if verdict is not None:
                found[index].append(verdict)

        fault: Exception | None = None
        try:
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as tasks:
                for index in range(len(questions)):
                    for vote in range(self._settings.votes):
                        tasks.create_task(ask(index, vote))
        except TimeoutError:
            fault = EndpointUnavailable(
                f"{self._settings.endpoint.base_url} did not give {missing} of {len(questions) * self._settings.votes} "
                f"answers within {deadline_s:g} s; a larger timeout_s of the function allows more time"
            )
        except ExceptionGroup as group:
            fault = _first(group)
            if not isinstance(fault, EndpointUnavailable):
                raise fault from None
        if fault is not None and self._settings.when_unavailable != "none":
            raise fault
        if fault is not None:
            seldom.warning("unavailable", "rewards are None because the judge gave no answer: %s", fault)
        if self._refusal and not any(found):
            raise RequestRefused(self._refusal)
        return found

    async def _verdict(self, messages: Messages, parse: Parse, seed: int) -> Verdict | None:
        for attempt in range(self._settings.answer_attempts):
            try:
                verdict = await self._answered(messages, parse, seed + attempt * REASKED_SEED)
            except RequestRefused as refusal:
                self._refusal = str(refusal)
                seldom.warning("refused", "the judge refuses a question: %s", refusal)
                return None
            if verdict is not None:
                return verdict
        self._count("no_verdict", 1)
        return None

    async def _answered(self, messages: Messages, parse: Parse, seed: int) -> Verdict | None:
        body: dict[str, Any] = {
            "model": self._settings.endpoint.model,
            "messages": messages,
            "max_tokens": self._settings.max_tokens,
            "temperature": self._settings.used_temperature,
            "seed": seed,
        }
        asked = {"at": self._settings.endpoint.base_url, "more": self._settings.endpoint.extra_body}
        digest = digest_of({"schema": self._schema, "structured": self._settings.structured, **body, **asked})
        cached = self._cache.get(digest) if self._cache is not None else None
        if cached is not None and (verdict := parse(cached)) is not None:
            self._count("cached", 1)
            return verdict
        if (running := self._running.get(digest)) is not None:
            with contextlib.suppress(BadAnswer):
                return parse(await asyncio.shield(running))
            return None
        future = self._running[digest] = asyncio.get_running_loop().create_future()
        try:
            text = await self._text(body)
        except BaseException as error:
            if isinstance(error, Exception):
                future.set_exception(error)
                future.exception()  # possibly nobody waits for it
            else:
                future.cancel()
            if isinstance(error, BadAnswer):
                seldom.warning("answer", "the judge's answer is invalid: %s", error)
                return None
            raise
        future.set_result(text)
        verdict = parse(text)
        if verdict is not None and self._cache is not None:
            self._cache.put(digest, text)
        return verdict

    async def _text(self, body: dict[str, Any]) -> str:
        key = (self._settings.endpoint.base_url, self._settings.endpoint.model)
        kind = self._settings.structured
        if kind == "auto":
            kind = "none" if key in _without_schema else "json_schema"
        try:
            answer = await self._endpoint.post("chat/completions", {**body, **self._format(kind)})
        except RequestRefused as refusal:
            if self._settings.structured != "auto" or kind == "none" or not _names_format(str(refusal)):
                raise
            _without_schema.add(key)
            log.warning("the judge does not support response_format, so only the prompt asks for JSON: %s", refusal)
            answer = await self._endpoint.post("chat/completions", body)
        self._count_usage(answer.get("usage"))
        try:
            text = answer["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            raise BadAnswer("the answer has no choices[0].message.content") from None
        if not isinstance(text, str):
            raise BadAnswer(f"the message in the answer is {type(text).__name__}, not text")
        return text

    def _format(self, kind: str) -> dict[str, Any]:
        if kind == "json_schema":
            schema = {"name": "verdict", "strict": True, "schema": self._schema}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        return {"response_format": {"type": "json_object"}} if kind == "json_object" else {}

    def _count_usage(self, usage: Any) -> None:
        endpoint = self._settings.endpoint
        prices = {"prompt_tokens": endpoint.prompt_price, "completion_tokens": endpoint.completion_price}
        for name, price in prices.items():
            tokens = usage.get(name) if isinstance(usage, dict) else None
            if isinstance(tokens, int) and not isinstance(tokens, bool) and 0 <= tokens < 1 << 40:
                self._count(name, tokens)
                self._count("cost", tokens * price / 1e6)


def _names_format(refusal: str) -> bool:
    return any(word in refusal for word in ("response_format", "json_schema", "guided", "structured"))


def _first(group: ExceptionGroup[Exception]) -> Exception:
    flat: list[Exception] = []
    for error in group.exceptions:
        flat.append(_first(error) if isinstance(error, ExceptionGroup) else error)
    return next((error for error in flat if isinstance(error, EndpointUnavailable)), flat[0])


def deadline_of(timeout_s: float) -> float:
    """Return the seconds for all questions of a call: less than the function's limit, at which its process is killed."""
    return max(0.5 * timeout_s, min(0.9 * timeout_s, timeout_s - 2.0))
