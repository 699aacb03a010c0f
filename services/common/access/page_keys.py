"""Controls access to the dashboard: holders of the coordinator's token or of one of the two keys in links to the
dashboard have access. A key is derived from the token and cannot be turned back into it, so a link in a terminal or a
chat exposes the page but not the cluster. A browser sends the key in a header, not in a cookie, so no other page can
make a browser use it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from enum import IntEnum
from pathlib import Path

from paceline.calls.token import read_token

KEY_LENGTH = 32


class Role(IntEnum):
    NOBODY = 0
    READER = 1
    OPERATOR = 2


class Access:
    """The keys of one coordinator's dashboard."""

    def __init__(self, token_file: Path, *, read_only: bool = False):
        """`token_file` is read for each call. With `read_only` everybody with a key is a reader."""
        self._file = token_file
        self._read_only = read_only
        self._instead = secrets.token_hex(32)
        """Secret from which the keys are derived if there is no token file."""

    def key(self, role: Role) -> str:
        secret = read_token(self._file) or self._instead
        name = f"paceline dashboard {role.name.lower()}"
        return hmac.new(secret.encode(), name.encode(), hashlib.sha256).hexdigest()[:KEY_LENGTH]

    def role(self, authorization: str) -> Role:
        """Return the caller's role by the value of the request's header `Authorization`."""
        sent = authorization.removeprefix("Bearer ").encode()
        token = read_token(self._file)
        granted = Role.NOBODY
        if token and hmac.compare_digest(sent, token.encode()):
            granted = Role.OPERATOR
        for role in (Role.READER, Role.OPERATOR):
            if hmac.compare_digest(sent, self.key(role).encode()):
                granted = max(granted, role)
        return self.limited(granted)

    def limited(self, role: Role) -> Role:
        return min(role, Role.READER) if self._read_only else role
