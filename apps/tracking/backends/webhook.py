"""Sends notices of a run's end, its stalls and its broken rules to a webhook, as signed HTTP POST requests.

Nothing waits for a webhook, and the ledger is its queue: undelivered messages are sent later, in order. Only a crash
after the answer and before the cursor is written repeats a delivery, with the same id.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import os
import urllib.error
import urllib.request
from typing import IO

from paceline.apps.tracking.tracker import TITLES, AlertKind, Refused, Step, TrackedRun, Tracker
from paceline.client import ENDED_STATES
from paceline.errors import InvalidInput
from paceline.spec.sections.system import WebhookSection

SECRET = "PACELINE_WEBHOOK_SECRET"
SIGNATURE, DELIVERY = "X-Paceline-Signature", "X-Paceline-Delivery"
RETRIED = {408, 425, 429}
"""Statuses below 500 that are retried."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which could lead a signed message to another host."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> None:
        return None


class Webhook(Tracker):
    def __init__(self, setting: WebhookSection, run: TrackedRun, timeout_s: float = 10.0):
        """Raises InvalidInput without an address in the variable that the spec names."""
        self._setting, self._run, self._timeout_s = setting, run, timeout_s
        self._address = setting.url or os.environ.get(setting.url_variable, "")
        if not self._address.startswith(("http://", "https://")):
            raise InvalidInput(
                f"{setting.url_variable} holds no http(s) address; set it where the webhook is sent from"
            )
        self._secret = os.environ.get(SECRET, "").encode()
        self._opener = urllib.request.build_opener(_NoRedirects)

    def alert(self, step: Step, kind: AlertKind, text: str) -> None:
        self._send(step, kind, f"{TITLES[kind]}: {text}", "")

    def change_state(self, step: Step, state: str, message: str) -> None:
        if state in ENDED_STATES:
            because = f": {message}" if message else ""
            self._send(
                step,
                "failed" if state == "failed" else "ended",
                f"The run has {'been ' if state == 'cancelled' else ''}{state}{because}",
                state,
            )

    def _send(self, step: Step, event: str, text: str, state: str) -> None:
        if event not in self._setting.events:
            return
        body = json.dumps(
            {
                "text": f"Paceline {self._run.run_id}: {text}",  # Slack shows this field
                "event": event,
                "run_id": self._run.run_id,
                "state": state,
                "step": step.number,
                "time": step.time_s,
                "delivery": self._delivery(step),
                "links": self._run.links,
            }
        ).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "paceline", DELIVERY: self._delivery(step)}
        if self._secret:
            headers[SIGNATURE] = signature(self._secret, body)
        request = urllib.request.Request(self._address, body, headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout_s):
                return
        except urllib.error.HTTPError as error:
            with error:
                if error.code < 500 and error.code not in RETRIED:
                    raise Refused(f"the webhook answers {error.code} to {event!r}") from None
                raise ConnectionError(f"the webhook answers {error.code}") from None

    def _delivery(self, step: Step) -> str:
        return f"{self._run.identity}-{step.sequence}"


def signature(secret: bytes, body: bytes) -> str:
    """Return the header's value that authenticates the sender of a body: HMAC with SHA-256, in hexadecimal."""
    return "sha256=" + hmac.new(secret, body, hashlib.sha256).hexdigest()
