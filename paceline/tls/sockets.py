"""Python's TLS over a connection that its peer may reset at any time."""

from __future__ import annotations

import ssl


class ResetSafeSocket(ssl.SSLSocket):
    """`SSLContext.wrap_socket` raises without closing what it has made where the peer has reset the connection before; this closes it.
    For `SSLContext.sslsocket_class`."""

    def __del__(self) -> None:
        self.close()
