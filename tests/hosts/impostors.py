"""Strangers' programs that pose as Paceline's servers: `python impostors.py HOST PORT [FOLDER [PLAN]]`.

Every call that reaches such a program gives a line of JSON: its method, what came with it, and what its credentials are good for at the
coordinator. A request for a proof gets a wrong one; every other call is refused. With FOLDER it has the certificate there. With PLAN, that
of `probes.py`, it also joins as a rollout worker that gives this address. Without FOLDER it belongs to another user of the host. It ends by
itself after POSE_S seconds.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
from probes import WAIT_S, Control, Plan, Refused, refusal

from paceline.calls.proof import PROVE
from paceline.tls.channels import open_plain_or_tls
from paceline.v1 import access_pb2, common_pb2, run_pb2, run_pb2_grpc

POSE_S = 120.0
NOBODY = 65534


def say(**told: object) -> None:
    """Print a line of JSON."""
    print(json.dumps(told), flush=True)


class Impostor(grpc.GenericRpcHandler):  # type: ignore[misc]  # its base is untyped
    """Answers as a server that knows no token."""

    def __init__(self, plan: Plan | None) -> None:
        self._plan = plan

    def service(self, handler_call_details: Any) -> Any:
        """Return a handler for any method."""
        method, sent = handler_call_details.method, handler_call_details.invocation_metadata

        def answer(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            values = [value if isinstance(value, bytes) else value.encode() for pair in sent for value in pair]
            if method == PROVE:
                say(heard=method, got=b"\0".join(values).hex(), replayed=self._replay(sent))
                proof = access_pb2.ProveResponse(nonce=secrets.token_bytes(24), proof=secrets.token_bytes(32))
                proof.server = "worker 0" if self._plan else "coordinator runs"
                yield proof.SerializeToString()
                return
            values += [next(requests, b"")]
            say(heard=method, got=b"\0".join(values).hex(), replayed=self._replay(sent))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")

        return grpc.stream_stream_rpc_method_handler(answer)

    def _replay(self, sent: Any) -> str:
        """Use what came with a call for one to the coordinator; return how it ended."""
        if self._plan is None:
            return "the coordinator is away"
        own = [(key, value) for key, value in sent if key.startswith(("paceline-", "authorization"))]
        with open_plain_or_tls(self._plan.people, folder=self._plan.folder("person")) as channel:
            try:
                run_pb2_grpc.RunServiceStub(channel).List(run_pb2.ListRequest(), metadata=own, timeout=WAIT_S)
            except grpc.RpcError as error:
                return str(error.code().name) if isinstance(refusal(error), Refused) else f"failed: {error}"
        return "OK"


def main(host: str, port: str, folder: str = "", plan_file: str = "") -> None:
    """Serve, and join if there is a plan."""
    document = json.loads(Path(plan_file).read_text()) if plan_file else {}
    document.pop("run_id", None)
    plan = Plan(**document) if document else None
    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((Impostor(plan),))
    if folder:
        pair = (Path(folder, "tls.key").read_bytes(), Path(folder, "tls.crt").read_bytes())
        server.add_secure_port(f"{host}:{port}", grpc.ssl_server_credentials([pair]))
    else:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        server.add_insecure_port(f"{host}:{port}")
    server.start()
    with ExitStack() as stack:
        if plan:
            lure = {"role": common_pb2.ROLE_ROLLOUT, "gives": f"{host}:{port}"}
            stack.enter_context(Control(plan, "insider", "worker", "insider-lure", **lure))
        say(posing=port)
        server.wait_for_termination(POSE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
