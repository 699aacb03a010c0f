"""The client of a service in SandboxFusion's shape, against a small one that runs here."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.reward.sandbox.protocol import Limits, SandboxFailed
from paceline.reward.sandbox.remote import RemoteSandbox

Answer = Callable[[dict[str, Any]], bytes]


def run_code(request: dict[str, Any]) -> bytes:
    """What such a service does, for Python and bash."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in request["files"].items():
            Path(folder, name).write_bytes(base64.b64decode(content))
        start = [sys.executable, "-c"] if request["language"] == "python" else ["bash", "-c"]
        try:
            ran = subprocess.run(
                [*start, request["code"]],
                input=request["stdin"],
                capture_output=True,
                text=True,
                cwd=folder,
                timeout=request["run_timeout"],
                check=False,
            )
            result = {
                "status": "Finished",
                "return_code": ran.returncode,
                "stdout": ran.stdout,
                "stderr": ran.stderr,
            }
        except subprocess.TimeoutExpired:
            result = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
    return json.dumps({"status": "Success", "run_result": result}).encode()


class Service:
    """A server on a free port that answers by `answer`, with the requests that it got."""

    def __init__(self) -> None:
        self.answer: Answer = run_code
        self.status = 200
        self.location = ""
        self.gets: list[dict[str, str]] = []
        self.got: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.got.append((self.path, dict(self.headers), body))
                answer = service.answer(body)
                self.send_response(service.status)
                self.send_header("Content-Length", str(len(answer)))
                if service.location:
                    self.send_header("Location", service.location)
                self.end_headers()
                with contextlib.suppress(OSError):  # the client may have had enough
                    self.wfile.write(answer)

            def do_GET(self) -> None:
                service.gets.append(dict(self.headers))
                self.send_error(404)

            def log_message(self, *_: Any) -> None:
                return

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def test_python_code_its_files_and_its_input_are_sent(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SANDBOX_TOKEN", "s3cret")
    program = b"import sys\nprint(open('data').read(), input()); sys.exit(2)"
    outcome = RemoteSandbox(service.url + "/").run(
        ["python", "main.py"],
        {"main.py": program, "data": b"\xc3\xa4"},
        Limits(time_s=7, memory_mb=99),
        b"in\n",
    )
    assert (outcome.ended, outcome.exit_code, outcome.stdout) == ("exited", 2, "ä in\n".encode())
    (path, headers, body), *_ = service.got
    assert path == "/run_code"
    assert headers["Authorization"] == "Bearer s3cret"
    assert (body["language"], body["run_timeout"], body["memory_limit_MB"]) == ("python", 7, 99)
    assert body["files"] == {"data": base64.b64encode(b"\xc3\xa4").decode()}


def test_a_redirect_is_not_followed_because_the_token_would_go_along(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_SANDBOX_TOKEN", "s3cret")
    service.status, service.location = 302, f"{service.url}/elsewhere"
    with pytest.raises(SandboxFailed, match="answered 302"):
        RemoteSandbox(service.url).run(["true"], {}, Limits())
    assert service.gets == []


def test_other_commands_are_a_line_of_bash(service: Service) -> None:
    outcome = RemoteSandbox(service.url).run(["cat", "a file"], {"a file": b"text"}, Limits())
    assert outcome.stdout == b"text"
    assert service.got[0][2]["code"] == "cat 'a file'"


def test_time_output_and_signals_have_their_names(service: Service) -> None:
    sandbox = RemoteSandbox(service.url)
    endless = {"main.py": b"while True: pass"}
    assert sandbox.run(["python", "main.py"], endless, Limits(time_s=0.5)).ended == "time"
    loud = {"main.py": b"print('x' * 3000)"}
    outcome = sandbox.run(["python", "main.py"], loud, Limits(output_bytes=1000))
    assert (outcome.ended, len(outcome.stdout)) == ("output", 1000)
    killed = {"main.py": b"import os; os.kill(os.getpid(), 9)"}
    assert sandbox.run(["python", "main.py"], killed, Limits()).signal == 9


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (500, b"{}", "answered 500"),
        (200, b"<html>", "not JSON"),
        (200, b"[" * 100_000, "not JSON"),
        (200, b"[1]", "not an object"),
        (200, b'{"status": "SandboxError", "message": "no room"}', "no room"),
        (200, b'{"status": "Success", "run_result": {"status": "Finished"}}', "no return_code"),
        (200, b'{"x": "' + b"y" * 20_000_000, "more than"),
    ],
)
def test_a_service_that_fails_is_never_an_outcome(service: Service, status: int, answer: bytes, message: str) -> None:
    service.status, service.answer = status, lambda _: answer
    with pytest.raises(SandboxFailed, match=message) as failed:
        RemoteSandbox(service.url).run(["python", "main.py"], {"main.py": b""}, Limits())
    assert isinstance(failed.value, ConnectionError)  # a reward worker returns the task


def test_a_service_that_is_away_is_never_an_outcome() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(SandboxFailed, match="cannot be reached"):
            RemoteSandbox(url).run(["true"], {}, Limits())
