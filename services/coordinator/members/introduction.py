"""Checks a worker's Hello: its certificate, its fields, and its right to the member id that it names. A member id names
one worker for the worker's life. A worker that shows the secret of a member's Welcome is that member on a new stream. A
worker without the secret waits until the member has been silent for the heartbeats' time-out."""

from __future__ import annotations

import hmac
import logging
from typing import Any

from paceline.calls.connection import FORM
from paceline.errors import Conflict, InvalidInput
from paceline.groups import MEMBER_ID
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.common.access.tls import identity_of_call
from paceline.services.coordinator.members.registry import ROLE_NAMES, Member
from paceline.tls.certificates import WORKER
from paceline.tls.folder import tls_folder
from paceline.v1 import common_pb2, worker_pb2
from paceline.wire import PROTOCOL

MAX_ADDRESS = 256
"""Largest number of characters of an address, host:port."""
MAX_RUN_ID = 128
MAX_RANKS = 1 << 16
MAX_SECRET = 64
MAX_LEARNER_ID = 64
KEY_BYTES = 32

ROLES = frozenset(ROLE_NAMES)


class OutdatedProtocol(Conflict):
    """The coordinator or the worker speaks an older protocol; the worker waits until the older side is updated."""


class PlaceTaken(Conflict):
    """Another member that is not silent has the id; the same Hello may succeed later."""


def check_hello(hello: worker_pb2.Hello) -> None:
    """Check the fields of a Hello. Raises OutdatedProtocol, or InvalidInput with the invalid value."""
    if not MEMBER_ID.fullmatch(hello.member_id):
        raise InvalidInput(
            f"member_id {hello.member_id[:80]!r} must be 1 to 64 of the characters A-Z a-z 0-9 . _ -; start the "
            "worker under another --name"
        )
    if hello.protocol != PROTOCOL:
        older = "worker" if hello.protocol < PROTOCOL else "coordinator"
        raise OutdatedProtocol(
            f"worker {hello.member_id} speaks protocol {hello.protocol}, but the coordinator speaks {PROTOCOL}: update the {older}"
        )
    if hello.role not in ROLES:
        raise InvalidInput(
            f"worker {hello.member_id} has the role {hello.role}, but this coordinator supports "
            f"{', '.join(f'{role} ({common_pb2.Role.Name(role)})' for role in sorted(ROLES))}; "
            "update the coordinator if it is older than the worker"
        )
    for name in ("address", "http_address"):
        value = getattr(hello, name)
        if len(value) > MAX_ADDRESS or not value.isprintable():
            raise InvalidInput(
                f"{name} of worker {hello.member_id} is {value[:80]!r}, but must be host:port of {MAX_ADDRESS} characters at most"
            )
    if len(hello.run_id) > MAX_RUN_ID:
        raise InvalidInput(
            f"run_id {hello.run_id[:80]!r} of worker {hello.member_id} is longer than {MAX_RUN_ID} characters"
        )
    if len(hello.secret) > MAX_SECRET:
        raise InvalidInput(
            f"the secret of worker {hello.member_id} has {len(hello.secret)} bytes, but at most {MAX_SECRET} are allowed"
        )
    if len(hello.exchange_key) not in (0, KEY_BYTES):
        raise InvalidInput(
            f"exchange_key of worker {hello.member_id} has {len(hello.exchange_key)} bytes, not {KEY_BYTES}"
        )
    if len(hello.learner_id) > MAX_LEARNER_ID:
        raise InvalidInput(
            f"learner_id of worker {hello.member_id} has {len(hello.learner_id)} characters, but at most "
            f"{MAX_LEARNER_ID} are allowed"
        )
    if hello.world_size > MAX_RANKS or hello.rank >= max(hello.world_size, 1):
        raise InvalidInput(
            f"worker {hello.member_id} reports rank {hello.rank} of {hello.world_size}; ranks count from 0, and "
            f"a learner has {MAX_RANKS} ranks at most"
        )


def check_key(hello: worker_pb2.Hello, owner: str | None, *, encrypted: bool) -> None:
    """Check the exchange key of a Hello; `owner` is the key's current member. Raises InvalidInput, Conflict."""
    if encrypted and not hello.exchange_key:
        raise InvalidInput(
            f"worker {hello.member_id} names no key for the exchange, which is encrypted; start it with --tls-dir, or update it"
        )
    if owner not in (None, hello.member_id):
        raise Conflict(f"the exchange_key of worker {hello.member_id} is the key of another member")


def checked_host(host: worker_pb2.HostAgent) -> worker_pb2.HostAgent | None:
    """Return the relay that a worker names; None if no other host could read from it."""
    texts = (host.agent_id, host.address, host.zone)
    is_sane = all(len(text) <= MAX_ADDRESS and text.isprintable() for text in texts)
    return host if is_sane and host.agent_id and FORM.fullmatch(host.address) else None


def check_place(hello: worker_pb2.Hello, member: Member | None) -> None:
    """Check that a worker may have the id of an existing member. Raises PlaceTaken."""
    if member is None or member.is_expected:
        return
    if member.role != hello.role:
        raise PlaceTaken(
            f"the id {hello.member_id} belongs to a {member.role_name} worker; start this worker under another --name"
        )
    secrets_shown = [secret for secret in (member.stream.secret, member.introduction.shown_secret) if secret]
    if any(hmac.compare_digest(hello.secret, secret) for secret in secrets_shown):
        return
    if member.connected or member.stream.is_heard:
        raise PlaceTaken(
            f"the id {hello.member_id} belongs to another worker, and this worker does not have its secret; this worker can have "
            "the id when the other has left or is silent for longer than the heartbeats' time-out"
        )


seldom = RateLimitedLog(logging.getLogger(__name__))


def check_certificate(context: Any) -> None:
    """Check that a worker's call has a worker's certificate, if this process uses TLS. Raises Conflict: the worker
    keeps its results and retries, because its certificate may be replaced."""
    if tls_folder() is None:
        return
    try:
        identity = identity_of_call(context)
        if identity is None:
            raise Conflict(
                "a worker must connect with its certificate to the coordinator's --port; this port is for people without a certificate"
            )
        if not identity.is_worker:
            raise Conflict(
                f"the certificate of {identity.name!r} has the role {identity.role}, but a worker needs the role {WORKER}"
            )
    except (Conflict, InvalidInput) as error:
        seldom.warning("certificate", "refused a worker at %s: %s", context.peer(), error)
        raise Conflict(str(error)) from None
