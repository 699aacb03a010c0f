"""`python -m services.common.healthcheck HOST:PORT`: exit status 0 when the server there is SERVING.

Containers use it as their health check. Every Paceline server answers `grpc.health.v1`.
"""

from __future__ import annotations

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.tls.channels import open_plain_or_tls


@click.command()
@click.argument("address")
@click.option(
    "--timeout", "timeout_s", default=3.0, show_default=True, help="Seconds to wait for the answer."
)
def main(address: str, timeout_s: float) -> None:
    """Ask the server at ADDRESS (HOST:PORT) whether it serves."""
    with open_plain_or_tls(address) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            raise click.ClickException(f"{address}: {error.code().name}") from None
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        raise click.ClickException(f"{address}: {name}")


if __name__ == "__main__":
    main()
