"""Webhooks at a real HTTP server: which events, signed, repeated until they are taken."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tracker_servers import RUN_ID, RecordedRun

from paceline.apps.tracking.backends.webhook import Webhook
from paceline.apps.tracking.follower import Follower, Setting, Target
from paceline.apps.tracking.tracker import TrackedRun, Tracker
from paceline.errors import InvalidInput
from paceline.spec.sections.system import WebhookSection

SECRET = b"known to both"


class Receiver:
    """A server that keeps what it got, and answers as told."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []
        """Statuses of the next answers; 0 never answers. Then 200."""
        self.over = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = receiver.answers.pop(0) if receiver.answers else 200
                if status == 0:
                    receiver.over.wait(60)
                    return
                if status == 200:
                    receiver.got.append((dict(self.headers), body))
                self.send_response(status)
                self.send_header("Location", f"http://127.0.0.1:{receiver.port}/elsewhere")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def events(self) -> list[tuple[str, str]]:
        contents = [json.loads(body) for _, body in self.got]
        return [(content["event"], content["text"]) for content in contents]

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_WEBHOOK_SECRET", SECRET.decode())


def impatient(setting: Setting, run: TrackedRun, _folder: Path) -> Tracker:
    assert isinstance(setting, WebhookSection)
    return Webhook(setting, run, timeout_s=1.0)


def send(run: RecordedRun, receiver: Receiver, folder: Path, **setting: Any) -> None:
    address = {"url": f"http://127.0.0.1:{receiver.port}/hook"} if "url_variable" not in setting else {}
    section = WebhookSection.model_validate(address | setting)
    target = Target(RUN_ID, "webhook-1", section, folder, {"coordinator": "here"})
    Follower(target, run.records(), impatient, first_backoff_s=0.01).run()


def add_all(run: RecordedRun) -> None:
    run.add_steps(1)
    run.add("warning", message="something")
    run.add("warning", message="it is low", rule="reward < 1")
    run.add("warning", message="it waits", stalled=True)
    run.add("state", state="failed", message="out of luck")


def test_the_events_that_are_named_are_sent_and_signed(run: RecordedRun, receiver: Receiver, tmp_path: Path) -> None:
    add_all(run)
    send(run, receiver, tmp_path)
    assert receiver.events == [
        ("rule", "Paceline sums-1: Rule broken: it is low"),
        ("stalled", "Paceline sums-1: Run stalls: it waits"),
        ("failed", "Paceline sums-1: The run has failed: out of luck"),
    ]
    headers, body = receiver.got[-1]
    expected = "sha256=" + hmac.new(SECRET, body, hashlib.sha256).hexdigest()
    assert headers["X-Paceline-Signature"] == expected
    content = json.loads(body)
    assert content["run_id"] == RUN_ID
    assert content["state"] == "failed"
    assert content["step"] == 1
    assert content["delivery"] == headers["X-Paceline-Delivery"]
    assert len({json.loads(each)["delivery"] for _, each in receiver.got}) == 3


def test_others_are_sent_where_they_are_asked_for(
    run: RecordedRun, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_HOOK", f"http://127.0.0.1:{receiver.port}/secret")
    add_all(run)
    send(run, receiver, tmp_path, url_variable="THE_HOOK", events=["warning"])
    assert receiver.events == [("warning", "Paceline sums-1: Warning: something")]


def test_a_receiver_that_fails_or_hangs_gets_each_once_and_in_order(
    run: RecordedRun, receiver: Receiver, tmp_path: Path
) -> None:
    add_all(run)
    receiver.answers = [500, 0, 429, 200, 503]
    send(run, receiver, tmp_path)
    assert [event for event, _ in receiver.events] == ["rule", "stalled", "failed"]


@pytest.mark.parametrize("status", [400, 302])
def test_a_refusal_is_left_out_and_no_redirect_is_followed(
    run: RecordedRun, receiver: Receiver, tmp_path: Path, status: int
) -> None:
    add_all(run)
    receiver.answers = [status]
    send(run, receiver, tmp_path)
    assert [event for event, _ in receiver.events] == ["stalled", "failed"]
    assert json.loads((tmp_path / "webhook-1.json").read_text())["refused"] == 1


def test_a_variable_without_an_address_is_named(run: RecordedRun, receiver: Receiver, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="NO_SUCH_HOOK holds no http"):
        send(run, receiver, tmp_path, url_variable="NO_SUCH_HOOK")
