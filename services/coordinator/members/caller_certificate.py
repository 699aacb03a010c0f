"""Mutual TLS of workers: a control stream begins only with a client certificate of the role `worker`."""

from __future__ import annotations

import logging
from typing import Any

from paceline.errors import Conflict, InvalidInput
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.common.access.tls import identity_of_call
from paceline.tls.certificates import WORKER
from paceline.tls.folder import tls_folder

seldom = RateLimitedLog(logging.getLogger(__name__))


def check_certificate(context: Any) -> None:
    """Check that a worker's call has a worker's certificate, where this process uses TLS. Raises Conflict: the worker keeps its
    results and tries again, because its certificate may be replaced."""
    if tls_folder() is None:
        return
    try:
        identity = identity_of_call(context)
        if identity is None:
            raise Conflict(
                "a worker connects with its certificate to the coordinator's --port; this port takes people, who have none"
            )
        if identity.role != WORKER:
            raise Conflict(
                f"the certificate of {identity.name!r} gives the role {identity.role}, and a worker needs the role {WORKER}"
            )
    except (Conflict, InvalidInput) as error:
        seldom.warning("certificate", "refused a worker at %s: %s", context.peer(), error)
        raise Conflict(str(error)) from None
