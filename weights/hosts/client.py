"""Connects a worker or learner rank to its host's relay, and starts the relay if there is none.

The promise: until `close`, a relay runs or is being started: a relay that dies, or is silent for `SILENCE_S`, is
replaced. Then `on_connected` is called again, and has to repeat everything that a relay must know. A relay outlives the
process that started it and ends with its last client. One thread connects, receives and calls back; any thread may
send.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from paceline.calls.backoff import pause_after
from paceline.errors import PacelineError, Unavailable
from paceline.rate_limited_log import RateLimitedLog, unforeseen
from paceline.v1 import host_agent_pb2, worker_pb2
from paceline.weights.hosts.local_socket import LocalConnection, connect

SILENCE_S = 5.0
"""Seconds of silence after which a relay counts as stuck; a sign of life is requested each second."""
ASK_S = 1.0
START_S = 15.0
POLL_S = 0.02
CONNECT_S = 2.0
CLOSE_WAIT_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
MODULE = "paceline.services.host_agent.main"

seldom = RateLimitedLog(logging.getLogger(__name__))


class RelayClient:
    """Connection to the relay with the socket `name`. The relay listens on the address `host` for other hosts, and they
    reach it at the address `advertised`."""

    def __init__(self, name: str, host: str, advertised: str, zone: str = "", silence_s: float = SILENCE_S) -> None:
        self.name = name
        self._host, self._advertised, self._zone, self._silence_s = host, advertised, zone, silence_s
        self.forget()
        self._connection: LocalConnection | None = None
        self._identity: host_agent_pb2.AgentIdentity | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="weights-relay", daemon=True)

    def forget(self) -> None:
        self.on_connected: Callable[[], None] = lambda: None
        self.on_reply: Callable[[host_agent_pb2.AgentReply, int | None], None] = close_fd

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a connection, at most `timeout_s` seconds; return whether there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: self._identity is not None, timeout_s)

    @property
    def identity(self) -> worker_pb2.HostAgent | None:
        """Id, address and zone of the relay, for the control plane; None without a relay."""
        identity = self._identity
        if identity is None:
            return None
        host = f"[{self._advertised}]" if ":" in self._advertised else self._advertised
        return worker_pb2.HostAgent(agent_id=identity.agent_id, address=f"{host}:{identity.port}", zone=self._zone)

    def send(self, request: host_agent_pb2.AgentRequest) -> None:
        """Send a request. Raises Unavailable if there is no connection; `on_connected` is called once there is one."""
        connection = self._connection
        if connection is None or self._identity is None:
            raise Unavailable("there is no relay on this host yet; a relay is being started")
        connection.send(request)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if (connection := self._connection) is not None:
            connection.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_WAIT_S)

    def _run(self) -> None:
        failures = 0
        while not self._closed:
            try:
                connection = self._connect()
                failures = 0
                self._follow(connection)
            except PacelineError as error:
                if self._closed:
                    return
                failures += 1
                seldom.warning("agent", "the connection to this host's relay for weights has ended: %s", error)
            except Exception as error:  # raised by a callback; the relay is still needed
                failures += 1
                unforeseen.note("a message of this host's relay", error)
            finally:
                with self._changed:
                    broken, self._connection, self._identity = self._connection, None, None
                if broken is not None:
                    broken.close()
            with self._changed:
                pause_s = pause_after(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S) if failures > 1 else 0.0
                self._changed.wait_for(lambda: self._closed, pause_s)

    def _connect(self) -> LocalConnection:
        with contextlib.suppress(Unavailable):
            return connect(self.name, CONNECT_S)
        process = start_relay(self.name, self._host)
        deadline_s = time.monotonic() + START_S
        while not self._closed:
            try:
                return connect(self.name, CONNECT_S)
            except Unavailable as error:
                status = process.poll()
                if time.monotonic() > deadline_s or status not in (None, 0):
                    raise Unavailable(f"the relay does not start (exit status {status}): {error}") from error
            time.sleep(POLL_S)
        raise Unavailable("this client is closed")

    def _follow(self, connection: LocalConnection) -> None:
        self._connection = connection
        hello = host_agent_pb2.AgentClient(protocol=1)
        connection.send(host_agent_pb2.AgentRequest(client=hello))
        heard_s, number = time.monotonic(), 0
        while not self._closed:
            received = connection.receive(host_agent_pb2.AgentReply, ASK_S)
            if received is None:
                if time.monotonic() - heard_s > self._silence_s:
                    with contextlib.suppress(OSError):
                        os.kill(connection.peer_pid, signal.SIGKILL)
                    raise Unavailable(f"the relay was silent for {self._silence_s:.0f} s; another one is started")
                number += 1
                connection.send(host_agent_pb2.AgentRequest(alive=host_agent_pb2.Alive(number=number)))
                continue
            heard_s = time.monotonic()
            reply, fd = received
            match reply.WhichOneof("reply"):
                case "identity":
                    with self._changed:
                        self._identity = reply.identity
                        self._changed.notify_all()
                    self.on_connected()
                case "alive":
                    pass
                case _:
                    self.on_reply(reply, fd)


def start_relay(name: str, host: str) -> subprocess.Popen[bytes]:
    """Start a relay in the background. It ends after its last client, or at once if another relay listens."""
    # Without a GPU and without the starter's death signal, because it serves all workers of the host.
    environment = {key: value for key, value in os.environ.items() if key != "PACELINE_STARTER"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, "--socket", name, "--host", host],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=process.wait, name="weights-relay-end", daemon=True).start()  # leaves no zombie
    return process


def close_fd(_: host_agent_pb2.AgentReply, fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
