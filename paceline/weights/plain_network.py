"""Weights in the clear between hosts: refused where this process has certificates, unless `weights.allow_plaintext_network` is true.

gloo, NCCL and torch's stores know neither encryption nor authentication. The agents of hosts do (`hosts/tls_transport.py`), and so do
object stores. A process without certificates listens beyond its host by `--insecure` alone, which covers weights too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from paceline.calls.connection import is_loopback
from paceline.errors import InvalidInput
from paceline.tls.folder import tls_folder

KEY = "weights.allow_plaintext_network"
PLAIN_SCHEMES = frozenset({"http", "ftp", "webhdfs"})
S3_SCHEMES = frozenset({"s3", "s3a"})
S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def check_plain(what: str, hosts: Iterable[str], *, allowed: bool, remedy: str) -> None:
    """Check that weights may travel by `what`, which does not encrypt, between these hosts. Raises InvalidInput."""
    if allowed or tls_folder() is None:
        return
    beyond = [host for host in hosts if host and not is_loopback(host)]
    if beyond:
        raise InvalidInput(
            f"{what} at {beyond[0]} would carry weights over the network in the clear, and this process has certificates "
            f"(--tls-dir); {remedy}, or set {KEY} to true where only the cluster's hosts reach that network"
        )


def check_store(url: str, environment: Mapping[str, str], *, allowed: bool) -> None:
    """Check that an object store is reached over TLS. Raises InvalidInput."""
    parts = urlsplit(url)
    if parts.scheme in PLAIN_SCHEMES:
        endpoint = url
    elif parts.scheme in S3_SCHEMES:
        endpoint = next((environment[name] for name in S3_ENDPOINTS if environment.get(name)), "")
    else:
        return
    if not endpoint.startswith("https://"):
        host = urlsplit(endpoint).hostname or ""
        remedy = "give it an https:// endpoint (AWS_ENDPOINT_URL)"
        check_plain(f"the object store {url.split('@')[-1]!r}", [host], allowed=allowed, remedy=remedy)
