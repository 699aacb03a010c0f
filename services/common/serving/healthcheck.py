"""Health check `python -m paceline.services.common.serving.healthcheck HOST:PORT`, for containers: exit status 0 if the
gRPC server is SERVING (`grpc.health.v1`), or if the page `http://HOST:PORT/PATH` answers with status 200."""

from __future__ import annotations

import http.client
import ssl
from urllib.parse import urlsplit

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.tls.certificates import COORDINATOR_HOST, WORKER_HOST, read_certificate
from paceline.tls.channels import NAME_OPTION, open_plain_or_tls
from paceline.tls.folder import TlsFolder, tls_folder


@click.command()
@click.argument("address")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, 1e9, min_open=True),
    default=3.0,
    show_default=True,
    help="Seconds to wait for the answer.",
)
@click.option("--service", default="", help="gRPC service to check. Default: the server as a whole.")
def main(address: str, timeout_s: float, service: str) -> None:
    """Ask the server at ADDRESS (HOST:PORT, or http://HOST:PORT/PATH) whether it serves."""
    if address.startswith("http://"):
        _get(address, timeout_s)
    else:
        _check(address, timeout_s, service)


def _get(address: str, timeout_s: float) -> None:
    """Get a page, without a proxy, with this host's TLS. Raises click.ClickException unless the status is 200."""
    parts, folder = urlsplit(address), tls_folder()
    connection = http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
    if folder is not None:
        context = ssl.create_default_context(cadata=folder.read().authority.decode())
        context.check_hostname = False  # the role is compared instead
        connection = http.client.HTTPSConnection(parts.netloc, timeout=timeout_s, context=context)
    try:
        if folder is not None:
            connection.connect()
            assert isinstance(connection.sock, ssl.SSLSocket)
            _check_role(connection.sock, folder)
        connection.request("GET", parts.path or "/")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise click.ClickException(f"{address}: {error}") from None
    finally:
        connection.close()
    if status != http.client.OK:
        raise click.ClickException(f"{address}: status {status}")


def _own_host(folder: TlsFolder) -> str:
    """Return the name of this process's role, which the server of the same container has too."""
    own = folder.read().certificate
    return WORKER_HOST if own and WORKER_HOST in read_certificate(own).hosts else COORDINATOR_HOST


def _check_role(connection: ssl.SSLSocket, folder: TlsFolder) -> None:
    """Raise ssl.SSLError unless the server has this process's role."""
    der = connection.getpeercert(binary_form=True) or b""
    if (name := _own_host(folder)) not in read_certificate(ssl.DER_cert_to_PEM_cert(der)).hosts:
        raise ssl.SSLError(f"its certificate lacks the name {name}")


def _check(address: str, timeout_s: float, service: str) -> None:
    folder = tls_folder()
    options = () if folder is None else ((NAME_OPTION, _own_host(folder)),)
    with open_plain_or_tls(address, options) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=service)
            response = stub.Check(request, timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            raise click.ClickException(f"{address}: {error.code().name}") from None
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        raise click.ClickException(f"{address}: {name}")


if __name__ == "__main__":
    main()
