"""Backend `remote`: a separate service runs the code, with the interface of SandboxFusion's `POST /run_code`.

E2B, Modal and other services fit behind the same interface. The service isolates the program. Its answer is read up to
a bound. If it gives no answer, the sandbox has failed, and the program gets no score. Its token comes from
PACELINE_SANDBOX_TOKEN.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import InvalidInput
from paceline.reward.sandbox.protocol import PYTHON, Ending, Limits, Outcome, SandboxFailed, check_request

TOKEN_VARIABLE = "PACELINE_SANDBOX_TOKEN"
OVERHEAD_S = 30.0
"""Seconds that the service may take beyond the program's limit."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which could lead the token to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


class RemoteSandbox:
    """Runs programs at the service, which sets all limits except time and output."""

    name = "remote"

    def __init__(self, url: str) -> None:
        """`/run_code` is appended to `url`. Raises InvalidInput for anything but http and https."""
        if not url.startswith(("http://", "https://")):
            raise InvalidInput(f"url {url!r} of sandbox remote must begin with http:// or https://")
        self._url = f"{url.rstrip('/')}/run_code"

    def run(self, argv: Sequence[str], files: Mapping[str, bytes], limits: Limits, stdin: bytes = b"") -> Outcome:
        """Run a program like `Sandbox.run`. argv `[python, FILE]` is sent as Python code, all else as a line of bash."""
        check_request(argv, files, stdin)
        started_s = time.monotonic()
        request = {
            **_program(argv, files),
            "stdin": stdin.decode(errors="surrogateescape"),
            "run_timeout": limits.time_s,
            "compile_timeout": limits.time_s,
            "memory_limit_MB": limits.memory_mb,
        }
        return _outcome(self._post(request, limits), limits, time.monotonic() - started_s)

    def _post(self, request: dict[str, Any], limits: Limits) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN_VARIABLE):
            headers["Authorization"] = f"Bearer {token}"
        body = json.dumps(request).encode(errors="surrogateescape")
        posted = urllib.request.Request(self._url, body, headers)
        most_bytes = 12 * limits.output_bytes + 65536  # two outputs, whose bytes take up to six bytes each in JSON
        try:
            with _OPENER.open(posted, timeout=limits.time_s + OVERHEAD_S) as answer:
                text = _read(answer, most_bytes + 1, time.monotonic() + limits.time_s + OVERHEAD_S)
        except urllib.error.HTTPError as error:
            with error:  # because it holds the connection
                raise SandboxFailed(f"the sandbox at {self._url} answered {error.code} {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            raise SandboxFailed(f"the sandbox at {self._url} cannot be reached: {error}") from error
        if len(text) > most_bytes:
            raise SandboxFailed(f"the sandbox at {self._url} answered more than {most_bytes} bytes")
        try:
            decoded = json.loads(text)
        except (ValueError, RecursionError):
            raise SandboxFailed(f"the sandbox at {self._url} answered {text[:60]!r}, which is not JSON") from None
        if not isinstance(decoded, dict):
            raise SandboxFailed(f"the sandbox at {self._url} answered {type(decoded).__name__}, not an object")
        return decoded


def _read(answer: http.client.HTTPResponse, most_bytes: int, until_s: float) -> bytes:
    """Return up to `most_bytes` of an answer. Raises TimeoutError if it is not complete at `until_s`."""
    text = bytearray()
    while len(text) < most_bytes and (piece := answer.read1(min(65536, most_bytes - len(text)))):
        text += piece
        if time.monotonic() > until_s:
            raise TimeoutError("the answer is not complete")
    return bytes(text)


def _program(argv: Sequence[str], files: Mapping[str, bytes]) -> dict[str, Any]:
    sent = dict(files)
    if argv[0] == PYTHON and len(argv) == 2 and argv[1] in files:
        language, code = "python", sent.pop(argv[1]).decode(errors="replace")
    else:
        language, code = "bash", shlex.join(argv)
    encoded = {name: base64.b64encode(content).decode() for name, content in sent.items()}
    return {"language": language, "code": code, "files": encoded}


def _outcome(answer: dict[str, Any], limits: Limits, duration_s: float) -> Outcome:
    result = answer.get("run_result")
    if answer.get("status") == "SandboxError" or not isinstance(result, dict):
        raise SandboxFailed(f"the sandbox failed: {str(answer.get('message') or answer)[:200]}")
    stdout, stderr = (str(result.get(name) or "").encode(errors="replace") for name in ("stdout", "stderr"))
    code = result.get("return_code")
    ending: Ending
    if max(len(stdout), len(stderr)) > limits.output_bytes:
        ending = "output"
    elif result.get("status") == "TimeLimitExceeded":
        ending = "time"
    elif isinstance(code, int) and not isinstance(code, bool):
        ending = "exited" if code >= 0 else "signal"
    else:
        raise SandboxFailed(f"the sandbox's answer has no return_code: {str(result)[:200]}")
    return Outcome(
        ended=ending,
        exit_code=code if ending == "exited" else None,
        signal=-code if ending == "signal" and isinstance(code, int) else None,
        stdout=stdout[: limits.output_bytes],
        stderr=stderr[: limits.output_bytes],
        duration_s=duration_s,
    )
