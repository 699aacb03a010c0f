"""Health check `python -m paceline.services.common.serving.healthcheck HOST:PORT`, for containers: exit status 0 if the
gRPC server is SERVING (`grpc.health.v1`), or if the page `http://HOST:PORT/PATH` answers with status 200."""

from __future__ import annotations

import http.client
import ssl
from urllib.parse import urlsplit

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.tls.channels import open_plain_or_tls
from paceline.tls.folder import tls_folder


@click.command()
@click.argument("address")
@click.option("--timeout", "timeout_s", default=3.0, show_default=True, help="Seconds to wait for the answer.")
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
        connection = http.client.HTTPSConnection(parts.netloc, timeout=timeout_s, context=context)
    try:
        connection.request("GET", parts.path or "/")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise click.ClickException(f"{address}: {error}") from None
    finally:
        connection.close()
    if status != http.client.OK:
        raise click.ClickException(f"{address}: status {status}")


def _check(address: str, timeout_s: float, service: str) -> None:
    with open_plain_or_tls(address) as channel:
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
