"""Checks that a submitted group has its lease's prompt, by encoding the prompt again and comparing.

The coordinator has no tokenizer; a child process (prompt_encoder.py) loads one when a run starts. If it cannot be
loaded from this machine's disk (only the workers have the model) or the template writes the date, prompts are not
compared, and `unavailable` has the reason; every other failure is a warning in the run's events. The exchange's check
thread calls `validate_upload`; the event loop calls `begin`, `take_warnings` and `close`.

The child gets only the environment variables of user code (`paceline/user_code/surroundings.py`), because the chat
template is user code; it needs neither the storage key nor a token. A child that does not answer within ANSWER_S is
killed, and prompts are not compared until the next run begins.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.data.messages import tools_of_prompt
from paceline.encryption.storage_key import StorageKey
from paceline.groups import IntArray
from paceline.rate_limited_log import unforeseen
from paceline.services.common.processes.tether import tethered
from paceline.services.coordinator.exchange.uploads.intake import Arrived
from paceline.services.coordinator.exchange.uploads.prompt_encoder import prompt_digest
from paceline.services.coordinator.ledger import database
from paceline.services.coordinator.ledger.group_queries import MAX_GROUP_ID, GroupQueries
from paceline.spec import PolicySection, RunSpec
from paceline.user_code.surroundings import passed_variables

LOAD_S = 60.0
"""Seconds within which a tokenizer must be loaded; groups that arrive meanwhile wait for it."""

ANSWER_S = 10.0
"""Seconds within which the child must answer."""

CHILD = "paceline.services.coordinator.exchange.uploads.prompt_encoder"
CHILD_VARIABLES = {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}

log = logging.getLogger(__name__)


class Refused(Exception):
    """The child cannot encode the run's prompts; the message has its reason."""


class PromptCheck:
    """Compares the prompts of one run at a time. `ledger` is the file with the prompts, encrypted with `key`."""

    def __init__(self, ledger: Path, key: StorageKey | None = None):
        self.unavailable = ""
        """Reason why prompts are not compared; empty while they are."""
        self._path, self._key = ledger, key
        self._reader: sqlite3.Connection | None = None
        """The check thread's connection to the ledger."""
        self.encoder: Encoder | None = None
        """Encoder of the run; None if prompts are not compared."""
        self._warnings: list[str] = []

    def begin(self, run_id: str, spec: RunSpec) -> None:
        """Start loading the run's tokenizer, without waiting for it. A check of an earlier run's group ends at once."""
        before, self.encoder, self.unavailable = self.encoder, None, ""
        if before is not None:
            before.end()
        if spec.environment.is_used:  # its prompts contain tools and the messages of `reset`
            self.unavailable = "the run's environment makes its prompts"
            return
        if not _is_here(spec.policy):
            self.unavailable = "the run's tokenizer is not on the coordinator's disk"
            log.info("run %s: uploaded prompts are not compared with the leased prompts: %s", run_id, self.unavailable)
            return
        try:
            self.encoder = Encoder(run_id, spec)
        except OSError as error:
            self._give_up(f"the process that encodes prompts cannot be started: {error}")

    def fault(self, run_id: str, group_id: int, prompt_ids: IntArray) -> str:
        """Return why `prompt_ids` are not the group's prompt; empty if they are, or if they cannot be compared."""
        encoder = self.encoder
        if encoder is None or encoder.run_id != run_id or not (recorded := self._prompt_of(run_id, group_id)):
            return ""
        prompt, columns = map(json.loads, recorded)
        try:
            answer = encoder.encode(prompt, tools_of_prompt(prompt, columns))
        except (OSError, ValueError, Refused) as error:
            if self.encoder is encoder:  # else another run has begun
                self.encoder = None
                refused = isinstance(error, Refused)
                self._give_up(str(error) if refused else f"the process that encodes prompts does not answer: {error}")
            encoder.end()
            return ""
        if "refused" in answer:
            return f"the prompt of group {group_id} cannot be encoded, so the group can have no prompt tokens: {answer['refused']}"
        if answer["digest"] != prompt_digest(prompt_ids):
            return (
                f"group {group_id} came with {len(prompt_ids)} prompt tokens that differ from its lease's prompt, which "
                f"has {answer['tokens']}; install the same tokenizer and version of transformers on worker and coordinator"
            )
        return ""

    def validate_upload(self, arrived: Arrived) -> None:
        """Set the fault of an upload whose prompt differs from its lease's. An unexpected error is logged, and the
        prompt is accepted without a comparison, because every other group waits for this thread."""
        if arrived.uploaded is None:
            return
        try:
            group = arrived.uploaded.group
            fault = self.fault(arrived.request.run_id, group.group_id, group.prompt_ids)
        except Exception as error:
            unforeseen.note("the comparison of a prompt", error)
            return
        if fault:
            arrived.fault, arrived.uploaded, arrived.record = fault, None, None

    def take_warnings(self) -> list[str]:
        warnings, self._warnings = self._warnings, []
        return warnings

    def close(self) -> None:
        if self.encoder is not None:
            self.encoder.end()
            self.encoder = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _prompt_of(self, run_id: str, group_id: int) -> tuple[str, str] | None:
        """Return the prompt and the other columns of a group; None for an unknown group, which the handler refuses."""
        if group_id > MAX_GROUP_ID:
            return None
        if self._reader is None:
            self._reader = database.connect(self._path, self._key, read_only=True, any_thread=True)
        groups = GroupQueries(self._reader)
        prompt = groups.prompt(run_id, group_id)
        return None if prompt is None else (prompt, groups.columns(run_id, group_id))

    def _give_up(self, reason: str) -> None:
        self.unavailable = reason
        self._warnings = [f"uploaded prompts are not compared with the leased prompts: {reason}"]


class Encoder:
    def __init__(self, run_id: str, spec: RunSpec):
        """Start the child, which then loads the tokenizer. Raises OSError."""
        self.run_id = run_id
        self._buffer, self._loaded = b"", False
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = subprocess.Popen(
                    tethered([sys.executable, "-m", CHILD]),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    env=passed_variables() | CHILD_VARIABLES,
                )
            self._say(
                {
                    "policy": spec.policy.model_dump(mode="json"),
                    "template": spec.data.apply_chat_template,
                    "template_kwargs": spec.data.chat_template_kwargs,
                }
            )
        except OSError:
            self._socket.close()
            if hasattr(self, "process"):  # it runs, but does not read
                self.process.kill()
                self.process.wait()
            raise

    def encode(self, prompt: Any, tools: list[Any] | None) -> dict[str, Any]:
        """Return the child's answer for a prompt with tools. Raises OSError or ValueError if it does not answer."""
        if not self._loaded:
            ready = self._hear(LOAD_S)
            if "refused" in ready:
                raise Refused(ready["refused"])
            self._loaded = True
        self._say({"prompt": prompt, "tools": tools})
        return self._hear(ANSWER_S)

    def end(self) -> None:
        """Kill the child; a thread that waits for its answer continues. Callable from any thread."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):  # already ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _say(self, line: dict[str, Any]) -> None:
        self._socket.settimeout(ANSWER_S)
        self._socket.sendall(json.dumps(line).encode() + b"\n")

    def _hear(self, within_s: float) -> dict[str, Any]:
        """Return the next line. Raises OSError for an ended or silent child, ValueError for a malformed answer."""
        self._socket.settimeout(within_s)
        while b"\n" not in self._buffer:
            content = self._socket.recv(1 << 16)
            if not content:
                raise ConnectionError("the process has ended; its log may have the reason")
            self._buffer += content
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _is_here(policy: PolicySection) -> bool:
    """Return whether the tokenizer is on this machine's disk: a folder, or a model in the hub's cache."""
    name = policy.tokenizer_name or policy.model_name
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    return Path(name).is_dir() or (cache / f"models--{name.replace('/', '--')}").is_dir()
