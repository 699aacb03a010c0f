"""TLS between two workers: each presents a certificate of the authority with the role `worker`. Host names are not
compared, because a relay uses addresses of its host's networks that a certificate need not list, and its data are
verified by digests from the control plane. A peer without a worker's certificate gets neither data nor a reason."""

from __future__ import annotations

import ssl
import threading

from paceline.errors import InvalidInput, Unavailable
from paceline.tls.certificates import identity_of
from paceline.tls.folder import Material, ResetSafeSocket, TlsFolder


class PeerTls:
    """Contexts from the newest certificates of `folder`, for any thread. Raises InvalidInput without a certificate."""

    def __init__(self, folder: TlsFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._material: Material | None = None
        self._contexts: dict[bool, ssl.SSLContext] = {}
        self.context(server=True)

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return the TLS context of the server or of the client. Raises InvalidInput."""
        with self._lock:
            material = self._folder.read()
            if material is not self._material:
                self._contexts = {side: self._made(material, server=side) for side in (True, False)}
                self._material = material
            return self._contexts[server]

    def _made(self, material: Material, *, server: bool) -> ssl.SSLContext:
        path = self._folder.path
        if not material.certificate:
            raise InvalidInput(
                f"{path} lacks tls.crt and tls.key, the worker's certificate for weights between hosts; `paceline certs "
                "issue` makes one"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.sslsocket_class = ResetSafeSocket
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=material.authority.decode())
        try:
            context.load_cert_chain(path / "tls.crt", path / "tls.key")
        except (OSError, ValueError):  # replaced meanwhile: the next connection has the newest
            if self._contexts:
                return self._contexts[server]
            raise InvalidInput(f"{path} changes while it is read; try again") from None
        return context


def check_worker(connection: ssl.SSLSocket) -> None:
    """Raise Unavailable unless the peer's verified certificate gives the role worker."""
    der = connection.getpeercert(binary_form=True)
    if not der:
        raise Unavailable("the peer has no certificate")
    try:
        identity = identity_of(ssl.DER_cert_to_PEM_cert(der))
    except InvalidInput as error:
        raise Unavailable(str(error)) from None
    if not identity.is_worker:
        raise Unavailable(
            f"the certificate of {identity.name!r} gives the role {identity.role}, and only workers may exchange weights"
        )
