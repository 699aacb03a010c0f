"""Weights in the clear: refused beyond this host with certificates, unless the key allows it."""

from __future__ import annotations

import pytest

from paceline.errors import InvalidInput
from paceline.tls.folder import VARIABLE
from paceline.weights.hosts.transport import check_plain, check_store


@pytest.fixture
def with_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/certificates")


def test_without_certificates_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    check_plain("a link", ["10.0.0.1"], allowed=False, remedy="")
    check_store("http://10.0.0.1/weights", {}, allowed=False)


@pytest.mark.usefixtures("with_certificates")
def test_beyond_this_host_the_key_has_to_allow_it() -> None:
    check_plain("a link", ["127.0.0.1", "localhost", "", "::1"], allowed=False, remedy="")
    check_plain("a link", ["10.0.0.1"], allowed=True, remedy="")
    with pytest.raises(
        InvalidInput,
        match=r"a link at 10\.0\.0\.1 .* in the clear.*use relays, or set weights\.allow_plaintext_network",
    ):
        check_plain("a link", ["127.0.0.1", "10.0.0.1"], allowed=False, remedy="use relays")


@pytest.mark.usefixtures("with_certificates")
@pytest.mark.parametrize(
    ("url", "endpoint", "is_refused"),
    [
        ("/shared/weights", "", False),
        ("s3://bucket/weights", "", False),
        ("s3://bucket/weights", "https://10.0.0.1:9000", False),
        ("s3://bucket/weights", "http://127.0.0.1:9000", False),
        ("s3://bucket/weights", "http://10.0.0.1:9000", True),
        ("http://10.0.0.1/weights", "", True),
        ("memory://weights", "http://10.0.0.1:9000", False),
    ],
)
def test_an_object_store_has_to_be_reached_over_tls(url: str, endpoint: str, is_refused: bool) -> None:
    environment = {"AWS_ENDPOINT_URL": endpoint} if endpoint else {}
    check_store(url, environment, allowed=True)
    if not is_refused:
        check_store(url, environment, allowed=False)
        return
    with pytest.raises(InvalidInput, match="give it an https:// endpoint"):
        check_store(url, environment, allowed=False)
