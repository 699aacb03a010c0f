"""A recorder that speaks the calls with which huggingface_hub makes a repository and commits files to it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OID = "c" * 40


class Hub:
    """What was sent to the hub."""

    def __init__(self) -> None:
        self.url = ""
        self.repositories: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.message = ""
        self.tokens: set[str] = set()
        """Of the calls that make or change a repository; huggingface_hub makes others without one."""

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """Return the answer to a request; KeyError for one that the hub does not have."""
        if path == "/api/repos/create":
            self.repositories.append(json.loads(body))
            return {"url": f"{self.url}/someone/sums", "name": "someone/sums", "id": "1"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            return {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
        if path.endswith("/commit/main"):
            for line in body.splitlines():
                part = json.loads(line)
                if part["key"] == "header":
                    self.message = part["value"]["summary"]
                elif part["key"] == "file":
                    self.files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])
            return {"success": True, "commitOid": OID, "commitUrl": f"{self.url}/someone/sums/commit/{OID}"}
        raise KeyError(path)


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve a hub on a free port of loopback."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                status, content = 200, hub.answer(self.path.partition("?")[0], body)
                if self.path.startswith(("/api/repos/", "/api/models/")):
                    hub.tokens.add(self.headers.get("Authorization", ""))
            except KeyError:
                status, content = 404, {"error": f"{self.path} is not here"}
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *_: Any) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
