"""Settings `kwargs.endpoint` of a reward function: address, limits and key of a service.

Promise: no message of this module has a key, or a value of the spec that could be one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import JsonValue, ValidationError, field_validator, model_validator

from paceline.errors import InvalidInput, Unreadable, nearest
from paceline.host.regular_file import open_regular, why_withheld
from paceline.spec.sections.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section

KEY_VARIABLE, KEY_FILES = "API_KEY", ("api_key", "api-key")
"""The name of a variable or file with a key must end in one of these, so that a spec cannot send other secrets."""
MAX_KEY_CHARS = 4096

SectionT = TypeVar("SectionT", bound=Section)


class EndpointSettings(Section):
    base_url: str
    """URL up to and including the version, such as `http://127.0.0.1:8000/v1`, without a route."""
    model: str
    api_key_env: str | None = None
    """Environment variable of the reward workers that holds the key; its name ends in API_KEY."""
    api_key_file: str | None = None
    """File of the reward workers' hosts that holds the key; absolute, and its name ends in api_key."""
    max_concurrency: PositiveInt = 32
    """Number of concurrent requests of the reward pool, divided among its processes; each process has at least one."""
    max_requests_per_minute: PositiveFloat | None = None
    """Largest number of requests per minute of the reward pool, divided among its processes; null for no limit."""
    attempts: PositiveInt = 4
    """Number of attempts at a request before the service counts as unavailable."""
    first_backoff_s: NonNegativeFloat = 0.5
    """Pause in seconds after the first failure, doubled after each further failure up to 30; a longer `Retry-After`
    takes precedence."""
    request_timeout_s: PositiveFloat = 60.0
    """Time limit of one attempt, in seconds."""
    cache: bool = True
    """Keep answers on the worker's disk, so that a repeated question costs nothing."""
    prompt_price: NonNegativeFloat = 0.0
    """Price of a million prompt tokens, for the metric `endpoint_cost`."""
    completion_price: NonNegativeFloat = 0.0
    """Price of a million completion tokens."""
    extra_body: dict[str, JsonValue] = {}
    """Further fields of each request. They replace fields of the same name, and null removes a field."""

    @field_validator("base_url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            named = bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            raise ValueError("the URL is invalid; write http://HOST:PORT/v1") from None
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(
                "the URL has a user, password or query; write the plain URL, and the key's variable in api_key_env"
            )
        if parts.scheme not in ("http", "https") or not named:
            raise ValueError("the URL is not an http or https URL; write http://HOST:PORT/v1")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _check_key(self) -> EndpointSettings:
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("api_key_env and api_key_file are both set; keep one")
        if self.api_key_env is not None and not self.api_key_env.endswith(KEY_VARIABLE):
            raise ValueError(f"api_key_env must name a variable that ends in {KEY_VARIABLE}")
        if self.api_key_file is not None:
            path = Path(self.api_key_file)
            if not path.is_absolute() or not path.name.endswith(KEY_FILES):
                raise ValueError(f"api_key_file must be an absolute path that ends in {KEY_FILES[0]}")
        return self

    def key(self) -> str:
        """Return the key, read at each call; empty if none is set. Raises Unreadable if a set key is missing on this
        host."""
        if self.api_key_env is not None:
            source, found = f"the variable {self.api_key_env}", os.environ.get(self.api_key_env, "")
        elif self.api_key_file is not None:
            source = f"the file {self.api_key_file}"
            try:
                path = Path(self.api_key_file).resolve()
                if not path.name.endswith(KEY_FILES) or why_withheld(str(path)):
                    raise Unreadable(
                        f"{source} leads to a file that holds no key of a judge; name the key's file itself"
                    )
                with open_regular(path) as file:
                    found = file.read(MAX_KEY_CHARS + 1).decode()
            except (OSError, UnicodeDecodeError) as error:
                raise Unreadable(f"{source} with the key cannot be read: {type(error).__name__}") from None
        else:
            return ""
        found = found.strip()
        if not found or len(found) > MAX_KEY_CHARS or not found.isascii() or not found.isprintable():
            raise Unreadable(f"{source} holds no key of printable characters; set it where the reward workers run")
        return found


def checked_settings(kind: type[SectionT], values: object, what: str) -> SectionT:
    """Return validated settings, called `what` in messages. Raises InvalidInput that names a field, never a value."""
    if not isinstance(values, Mapping):
        raise InvalidInput(f"{what} is {type(values).__name__}; it must be a mapping")
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        faults = "; ".join(_fault(kind, fault, what) for fault in error.errors(include_input=False, include_url=False))
        raise InvalidInput(faults) from None


def _fault(kind: type[Section], fault: Any, what: str) -> str:
    name = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        if name.rpartition(".")[2] in ("api_key", "key", "token", "password", "headers"):
            return f"{what} takes no {name!r}: keys stay out of the spec; name its variable in api_key_env, or its file"
        fields = [*kind.model_fields, *(f"endpoint.{field}" for field in EndpointSettings.model_fields)]
        return f"{what} takes no {name!r}{nearest(name, fields)}"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{what}{f'.{name}' if name else ''}: {message}"
