"""TLS over connections that are reset."""

from __future__ import annotations

import socket
import ssl
import struct

import pytest

from paceline.tls.folder import ResetSafeSocket

RESET = struct.pack("ii", 1, 0)


def test_nothing_stays_open_of_a_connection_that_was_reset_before() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.sslsocket_class = ResetSafeSocket
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname(), 10.0)
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        accepted.close()
        with pytest.raises(ConnectionResetError):  # pytest fails the test for what is left open
            context.wrap_socket(connection)
