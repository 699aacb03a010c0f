"""The process of one reward model: scores the requests of all runners together, and loads newer weights.

Threads: one reads requests from the socket into a queue. The main thread takes all waiting requests, scores them in
common passes and answers. With `refresh_s` a third thread checks for other weights and loads them, and the main thread
switches to them between two batches. The process ends when the runner closes its socket.

runner → process    {"model": settings, "function": name, "memory_bytes": n}   once, first
                    {"id": n, "prompts": [C], "completions": [C]}
process → runner    {"loaded": version} | {"refused": text, "passing": bool}
                    {"id": n, "scores": [[…] or null], "version": text} | {"id": n, "raised": text} | {"id": n, "unavailable": text}
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from pathlib import Path
from typing import Any

from paceline.errors import InvalidInput, PacelineError, Unreadable, error_text
from paceline.user_code.child import connect
from paceline.user_code.frames import encode, receive

log = logging.getLogger(__name__)

MAX_GROUPS = 256
"""Largest number of groups that are scored in common passes."""


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with connect(killed_first=False) as connection, contextlib.suppress(EOFError, ConnectionError):
        _serve(connection)


def _serve(connection: socket.socket) -> None:
    try:
        server = ModelServer(receive(connection))
    except PacelineError as error:
        passing = isinstance(error, Unreadable) or not isinstance(error, InvalidInput)
        connection.sendall(encode({"refused": str(error), "passing": passing}))
        return
    except Exception as error:  # from torch, its device or the memory limit
        why = (
            f"the reward model cannot be loaded: {error_text(error)}; memory_mb of its function may be too small for it"
        )
        connection.sendall(encode({"refused": why, "passing": True}))
        return
    connection.sendall(encode({"loaded": server.version}))
    requests: queue.Queue[dict[str, Any] | None] = queue.Queue()  # bounded by the number of the runner's processes
    reader = threading.Thread(target=_read, args=(connection, requests), daemon=True, name="requests")
    reader.start()
    server.start_refreshing()
    while (first := requests.get()) is not None:  # no deadline: an idle model has nothing else to do
        batch = [first]
        while len(batch) < MAX_GROUPS and not requests.empty():
            request = requests.get()
            if request is None:
                return
            batch.append(request)
        for reply in server.answers(batch):
            connection.sendall(encode(reply))


def _read(connection: socket.socket, requests: queue.Queue[dict[str, Any] | None]) -> None:
    try:
        while True:
            requests.put(receive(connection))
    except (EOFError, OSError, PacelineError):
        requests.put(None)


class ModelServer:
    def __init__(self, load: dict[str, Any]) -> None:
        """Load the model. Raises InvalidInput for another kind of model or damaged files, and Unreadable if files or
        the device are missing or the server is not reachable."""
        from paceline.reward.models.pooled import open_scorer
        from paceline.reward.models.scorer import device_of
        from paceline.reward.models.settings import model_settings

        self._settings = model_settings(load["function"], load["model"])
        if device_of(self._settings).type == "cpu":  # CUDA reserves far more address space than it uses
            _limit_memory(load["memory_bytes"])
        self._load = open_scorer
        self._scorer: Any = open_scorer(self._settings)
        self._newer: Any = None
        self._stopped = threading.Event()

    @property
    def version(self) -> str:
        return str(self._scorer.version)

    def answers(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a reply to each request. Groups share passes; if a pass fails, each group is scored alone."""
        newer = self._newer
        if newer is not None and newer is not self._scorer:
            log.info("the reward model %s scores with version %s now", self._settings.path, newer.version)
            self._scorer = newer
        found: dict[int, dict[str, Any]] = {}
        encoded: list[tuple[int, list[Any]]] = []
        for index, request in enumerate(requests):
            try:
                pairs = zip(request["prompts"], request["completions"], strict=True)
                encoded.append((index, [self._scorer.encode(*pair) for pair in pairs]))
            except Exception as error:  # a text that the tokenizer or its template rejects
                found[index] = _raised(request, error)
        try:
            self._score_together(requests, encoded, found)
        except ConnectionError as error:  # of the server that holds the model
            for index, _ in encoded:
                found[index] = _raised(requests[index], error)
        except Exception:
            for item in encoded:
                try:
                    self._score_together(requests, [item], found)
                except Exception as error:
                    found[item[0]] = _raised(requests[item[0]], error)
        return [found[index] for index in range(len(requests))]

    def _score_together(
        self, requests: list[dict[str, Any]], encoded: list[tuple[int, list[Any]]], found: dict[int, dict[str, Any]]
    ) -> None:
        scores = iter(self._scorer.scores([text for _, texts in encoded for text in texts]))
        for index, texts in encoded:
            own = [next(scores) for _ in texts]
            found[index] = {"id": requests[index]["id"], "scores": own, "version": self.version}

    def start_refreshing(self) -> None:
        if self._settings.refresh_s:
            threading.Thread(target=self._refresh, daemon=True, name="refresh").start()

    def stop_refreshing(self) -> None:
        self._stopped.set()

    def _refresh(self) -> None:
        from paceline.reward.models.scorer import fetched

        seen, refused = self.version, ""
        while not self._stopped.wait(self._settings.refresh_s):
            version = ""
            try:
                version = fetched(self._settings.path)[1]
                if version != seen:
                    self._newer = self._load(self._settings)
                    seen = self._newer.version
            except Exception as error:
                # The present weights stay in use; the files may be complete at the next check.
                if refused != version + str(error):
                    log.warning(
                        "the reward model %s keeps version %s, because other weights failed to load: %s",
                        self._settings.path,
                        seen,
                        error,
                    )
                refused = version + str(error)


def _raised(request: dict[str, Any], error: Exception) -> dict[str, Any]:
    if isinstance(error, ConnectionError):
        return {"id": request["id"], "unavailable": str(error)[:2000]}
    return {"id": request["id"], "raised": f"{type(error).__name__}: {error}"[:2000]}


def _limit_memory(memory_bytes: int) -> None:
    import resource

    with contextlib.suppress(OSError, ValueError):
        mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = mapped_bytes + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
