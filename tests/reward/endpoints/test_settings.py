"""Settings of an endpoint: what is refused, and that no message holds a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidInput, Unreadable
from paceline.reward.endpoints.settings import EndpointSettings, checked_settings

SECRET = "sk-live-0123456789abcdef"
PLAIN = {"base_url": "http://judge:8000/v1/", "model": "m"}


def settings(**changes: Any) -> EndpointSettings:
    return checked_settings(EndpointSettings, {**PLAIN, **changes}, "endpoint")


def test_the_url_loses_its_last_slash() -> None:
    assert settings().base_url == "http://judge:8000/v1"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"api_key": SECRET}, "takes no 'api_key': keys stay out of the spec"),
        ({"headers": {"Authorization": SECRET}}, "takes no 'headers': keys stay out of the spec"),
        ({"attemps": 3}, "did you mean 'attempts'"),
        (
            {"base_url": f"http://user:{SECRET}@judge/v1"},
            "endpoint.base_url: the URL has a user, password or query",
        ),
        ({"base_url": f"http://judge/v1?key={SECRET}"}, "user, password or query"),
        ({"base_url": "file:///etc/passwd"}, "not an http or https URL"),
        ({"base_url": "http://judge:port/v1"}, "the URL is invalid"),
        ({"base_url": "judge:8000"}, "not an http or https URL"),
        ({"api_key_env": "PACELINE_TOKEN"}, "must name a variable that ends in API_KEY"),
        ({"api_key_env": SECRET}, "must name a variable"),
        ({"api_key_file": "/etc/shadow"}, "ends in api_key"),
        ({"api_key_file": "api_key"}, "absolute path"),
        ({"api_key_env": "A_API_KEY", "api_key_file": "/run/api_key"}, "both set"),
        ({"attempts": 0}, "endpoint.attempts"),
    ],
)
def test_what_is_refused_is_named_without_its_value(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidInput, match=match) as caught:
        settings(**changes)
    assert SECRET not in str(caught.value)


def test_a_value_that_is_no_mapping() -> None:
    with pytest.raises(InvalidInput, match="endpoint is str"):
        checked_settings(EndpointSettings, SECRET, "endpoint")


def test_a_key_comes_from_a_variable_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert settings().key() == ""
    monkeypatch.setenv("MY_API_KEY", f" {SECRET}\n")
    assert settings(api_key_env="MY_API_KEY").key() == SECRET
    file = tmp_path / "judge.api_key"
    file.write_text(f"{SECRET}\n")
    assert settings(api_key_file=str(file)).key() == SECRET


@pytest.mark.parametrize("content", ["", "two\nlines", "caf\u00e9", "x" * 5000])
def test_a_key_that_is_none_is_refused_without_its_text(tmp_path: Path, content: str) -> None:
    file = tmp_path / "api_key"
    file.write_text(content)
    with pytest.raises(Unreadable, match="holds no key of printable characters") as caught:
        settings(api_key_file=str(file)).key()
    assert not content or content not in str(caught.value)


def test_a_key_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="MISSING_API_KEY holds no key"):
        settings(api_key_env="MISSING_API_KEY").key()
    with pytest.raises(Unreadable, match="cannot be read: FileNotFoundError"):
        settings(api_key_file=str(tmp_path / "api_key")).key()
