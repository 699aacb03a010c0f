"""An S3 server in memory (moto) at the near site, and the environment with which s3fs finds it."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from slow_link.site import NEAR, until_listening

BUCKET = "weights"
START_S = 60.0


def missing() -> str:
    """Return the packages that are not installed; empty if none."""
    packages = [name for name in ("s3fs", "moto") if importlib.util.find_spec(name) is None]
    return f"it needs the packages {', '.join(packages)}: pip install s3fs 'moto[server]'" if packages else ""


@contextmanager
def s3_server() -> Iterator[str]:
    """Return the URL of an empty bucket, which this process and its children can use while it is open."""
    with socket.create_server((NEAR, 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{NEAR}:{port}",
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", NEAR, "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until_listening(NEAR, port, START_S)
        import s3fs

        s3fs.S3FileSystem().mkdir(BUCKET)
        yield f"s3://{BUCKET}"
    finally:
        server.kill()
        server.wait()
