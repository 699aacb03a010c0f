"""Sends POST requests to one service, with retries, back-off, rate limits and bounded answers.

Promise: every request ends in an answer or in one of three errors, and no error message contains the key. The caller
sets the deadline for all its requests.

    EndpointUnavailable   no answer after all attempts: a fault of the service or the network, or a refused key
    RequestRefused        the service rejects this request (400, 413, 422)
    BadAnswer             the answer is not a JSON object, or too large

Each process keeps its share of the rate limit of the whole reward pool, so the pool keeps the limit without
communication. A pause that the service requests applies to all requests of the process.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from paceline.calls.backoff import pause_after
from paceline.errors import Unreadable
from paceline.reward.endpoints.settings import EndpointSettings

MAX_PAUSE_S = 300.0
"""Longest pause that a service may request, in seconds."""


class RequestRate:
    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._next_s = self._paused_until_s = 0.0

    async def turn(self, per_minute: float | None) -> None:
        """Wait until the next request may start. `per_minute` is this process's share; None for no limit."""
        now_s = self._clock()
        start_s = max(now_s, self._paused_until_s)
        if per_minute is not None:
            start_s = max(start_s, self._next_s)
            self._next_s = start_s + 60.0 / per_minute
        if start_s > now_s:
            await self._sleep(start_s - now_s)

    def pause(self, seconds: float) -> None:
        self._paused_until_s = max(self._paused_until_s, self._clock() + min(seconds, MAX_PAUSE_S))


def share_of(limit: float, num_processes: int) -> float:
    return limit / max(1, num_processes)


def slots_of(limit: int, num_processes: int) -> int:
    """Return how many of the pool's `limit` concurrent requests one process may have; at least 1."""
    return max(1, limit // max(1, num_processes))


MAX_ANSWER_BYTES = 8 << 20
MAX_EXCERPT = 300
LONGEST_BACKOFF_S = 30.0
SHOWN_CHARS = 6
REFUSED = (400, 413, 422)
LASTING = (401, 403, 404, 405, 407)
"""HTTP statuses that a retry would get again, because a person must correct the key, the model or the URL."""

Count = Callable[[str, float], None]
"""Adds a value to one of the function's sums: `requests`, `failed`, `prompt_tokens`, …"""

_rates: dict[tuple[str, str], RequestRate] = {}
"""Maps a URL and a model to the rate of requests to them. All calls of the process share these rates."""


class EndpointUnavailable(ConnectionError):
    """The service gave no answer. The group is scored again later."""


class RequestRefused(Exception):
    """The service rejects the content of a request."""


class BadAnswer(Exception):
    """The service violated its protocol."""


class _Passing(Exception):
    """An attempt failed in a way that a retry may resolve."""

    def __init__(self, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class Endpoint:
    """Connections to one service for one call of a reward function. An async context manager."""

    def __init__(self, settings: EndpointSettings, count: Count, num_processes: int = 1) -> None:
        """The pool's `num_processes` processes share the service's limits. Raises EndpointUnavailable if its key is
        missing."""
        self._settings, self._count = settings, count
        try:
            self._key = settings.key()
        except Unreadable as error:
            raise EndpointUnavailable(str(error)) from None
        self._slots = asyncio.Semaphore(slots_of(settings.max_concurrency, num_processes))
        limit = settings.max_requests_per_minute
        self._per_minute = None if limit is None else share_of(limit, num_processes)
        self._rate = _rates.setdefault((settings.base_url, settings.model), RequestRate())
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Endpoint:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = aiohttp.ClientTimeout(total=self._settings.request_timeout_s)
        connector = aiohttp.TCPConnector(limit=0)  # the slots are the limit
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON object that the service answers to `body`, with `extra_body` merged into it.

        Raises EndpointUnavailable, RequestRefused, BadAnswer.
        """
        merged = {**body, **self._settings.extra_body}
        sent = json.dumps({name: value for name, value in merged.items() if value is not None}).encode()
        return await self._attempts("POST", route, sent)

    async def get(self, route: str) -> dict[str, Any]:
        """Return the JSON object of a route. Raises EndpointUnavailable, RequestRefused, BadAnswer."""
        return await self._attempts("GET", route, None)

    async def _attempts(self, method: str, route: str, sent: bytes | None) -> dict[str, Any]:
        url = f"{self._settings.base_url}/{route}"
        for attempt in range(1, self._settings.attempts + 1):
            try:
                async with self._slots:
                    await self._rate.turn(self._per_minute)
                    self._count("requests", 1)
                    return await self._once(method, url, sent)
            except _Passing as error:
                self._count("failed", 1)
                self._rate.pause(error.retry_after_s)
                if attempt == self._settings.attempts:
                    raise EndpointUnavailable(f"{url} {error} (attempt {attempt} of {attempt})") from None
                backoff_s = pause_after(attempt, self._settings.first_backoff_s, LONGEST_BACKOFF_S)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            except (RequestRefused, BadAnswer):
                self._count("failed", 1)
                raise
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, method: str, url: str, sent: bytes | None) -> dict[str, Any]:
        assert self._session is not None, "used inside its context"
        headers = {"Content-Type": "application/json"}
        try:
            # A redirect could send the key elsewhere.
            async with self._session.request(method, url, data=sent, headers=headers, allow_redirects=False) as answer:
                text = await _read(answer)
                status, retry_after = answer.status, answer.headers.get("Retry-After", "")
        except TimeoutError:
            raise _Passing(f"did not answer within {self._settings.request_timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Passing(f"cannot be reached: {self._redacted(f'{type(error).__name__}: {error}')}") from None
        if status == 200:
            return _object(text)
        why = f"answered {status}: {self._redacted(_reason(text))}"
        if status in REFUSED:
            raise RequestRefused(f"{url} {why}")
        if status in LASTING or 300 <= status < 400:
            self._count("failed", 1)
            raise EndpointUnavailable(f"{url} {why}; check base_url, model and the key")
        raise _Passing(why, _seconds(retry_after))

    def _redacted(self, text: str) -> str:
        if self._key:
            text = text.replace(self._key, "…")
        if len(self._key) > 2 * SHOWN_CHARS:  # services repeat its first characters and asterisks
            text = re.sub(re.escape(self._key[:SHOWN_CHARS]) + r"\S*", "…", text)
        return "".join(c if c.isprintable() else " " for c in text[:MAX_EXCERPT])


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    parts, size_bytes = [], 0
    async for part in answer.content.iter_chunked(1 << 16):
        size_bytes += len(part)
        if size_bytes > MAX_ANSWER_BYTES:
            raise BadAnswer(f"the answer has more than {MAX_ANSWER_BYTES >> 20} MB")
        parts.append(part)
    return b"".join(parts)


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise BadAnswer(f"the answer {text[:40]!r} is not JSON") from None
    if not isinstance(found, dict):
        raise BadAnswer(f"the answer is {type(found).__name__}, not an object")
    return found


def _reason(text: bytes) -> str:
    found: Any = text.decode("utf-8", "replace")
    try:
        parsed = json.loads(text)
        for name in ("error", "message", "detail"):
            if isinstance(parsed, dict) and parsed.get(name):
                parsed = found = parsed[name]
    except (ValueError, RecursionError):
        pass
    return found if isinstance(found, str) else json.dumps(found)


def _seconds(retry_after: str) -> float:
    """Return the seconds of a Retry-After header (a number or a date); 0 if the header is missing or invalid."""
    if retry_after.strip().isdecimal():
        return float(retry_after[:9])
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
