"""A real HTTP server that answers `/pooling` and `/v1/models` as vLLM's does, computed by transformers one text after another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from json import dumps, loads
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification


class PoolingServer(ThreadingHTTPServer):
    """A model on a port of loopback. `broken` is a status that it answers instead, `longest` its max_model_len."""

    daemon_threads = True

    def __init__(self, folder: Path, by_token: bool, longest: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        kind = AutoModelForTokenClassification if by_token else AutoModelForSequenceClassification
        self.model: Any = kind.from_pretrained(folder).eval()
        self.task = "token_classify" if by_token else "classify"
        self.longest = longest
        self.broken = 0
        self.requests: list[dict[str, Any]] = []
        self.turned = False
        """Whether it leaves the last result out."""

    @property
    def endpoint(self) -> dict[str, Any]:
        return {
            "base_url": f"http://127.0.0.1:{self.server_port}",
            "model": "rm",
            "attempts": 2,
            "first_backoff_s": 0.0,
        }

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        texts = body["input"]
        if body["model"] != "rm":
            return _error(404, f"The model `{body['model']}` does not exist.")
        if body["task"] != self.task:
            return _error(400, f"Try switching the model's pooling_task via --pooler-config.task {body['task']}.")
        if any(len(ids) > self.longest for ids in texts):
            return _error(400, f"This model's maximum context length is {self.longest} tokens.")
        outputs = []
        with torch.inference_mode():
            for ids in texts:
                logits = self.model(input_ids=torch.tensor([ids])).logits[0]
                outputs.append((logits if body["use_activation"] is False else logits.sigmoid()).tolist())
        rows = [{"index": index, "object": "pooling", "data": each} for index, each in enumerate(outputs)]
        data = list(reversed(rows))[self.turned :]
        usage = {
            "prompt_tokens": sum(map(len, texts)),
            "total_tokens": sum(map(len, texts)),
            "completion_tokens": 0,
        }
        return 200, {
            "id": "pool-1",
            "object": "list",
            "created": 1,
            "model": "rm",
            "data": data,
            "usage": usage,
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: PoolingServer

    def do_GET(self) -> None:
        model = {"id": "rm", "object": "model", "owned_by": "vllm", "max_model_len": self.server.longest}
        found = self.path == "/v1/models"
        self._send(200 if found else 404, {"object": "list", "data": [model]} if found else {})

    def do_POST(self) -> None:
        body = loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        if self.server.broken or self.path != "/pooling":
            self._send(*_error(self.server.broken or 404, "no"))
        else:
            self._send(*self.server.answer(body))

    def _send(self, status: int, body: dict[str, Any]) -> None:
        content = dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _error(status: int, message: str) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}


@contextmanager
def pooling_server(folder: Path, *, by_token: bool = False, longest: int = 64) -> Iterator[PoolingServer]:
    """A server that is closed at the end."""
    server = PoolingServer(folder, by_token, longest)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
