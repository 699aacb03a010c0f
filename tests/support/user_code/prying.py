"""What hostile user code tries: `attempts` returns the names of those that succeed. It is also the text of a reward function's file."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys

PTRACE_ATTACH, PTRACE_DETACH = 16, 17


def attempts(aims):
    """Return what succeeded. aims: `canary`, a text that is in each secret; `files` to read and change by name; `pid` of another
    process with the canary in its environment; `abstract`, the name of a listening socket; `code`, folders from which Python loads code,
    by name."""
    canary, pid = aims["canary"], aims["pid"]
    tries = {
        "own environment": lambda: canary in repr(dict(os.environ)),
        "own descriptors": lambda: len(strange_descriptors()) > 0,
        "environment of another process": lambda: canary in read(f"/proc/{pid}/environ"),
        "environment of another process, by a child": lambda: canary in output("cat", f"/proc/{pid}/environ"),
        "memory of another process": lambda: open(f"/proc/{pid}/mem", "rb").close() is None,
        "descriptors of another process": lambda: bool(os.readlink(f"/proc/{pid}/fd/0")),
        "trace of another process": lambda: traced(pid),
        "signal to another process": lambda: os.kill(pid, signal.SIGCONT) is None,
        "abstract socket": lambda: connected(aims["abstract"]),
    }
    for name, folder in aims.get("code", {}).items():
        tries[f"write {name}"] = lambda folder=folder: written(os.path.join(folder, "paceline-pry.pth"))
    for name, path in aims["files"].items():
        tries[f"read {name}"] = lambda path=path: canary in read(path)
        tries[f"read {name} by a child"] = lambda path=path: canary in output("cat", path)
        tries[f"append to {name}"] = lambda path=path: open(path, "ab").close() is None
        tries[f"link {name}"] = lambda path=path: linked(path)
        tries[f"move the folder of {name}"] = lambda path=path: moved(os.path.dirname(path))
    return [name for name, attempt in tries.items() if succeeds(attempt)]


def answer_to_hello(address):
    """Return the coordinator's answer to a Hello without a token: `welcome`, or the status of its refusal."""
    import grpc

    from paceline.v1 import common_pb2, worker_pb2, worker_pb2_grpc

    hello = worker_pb2.Hello(role=common_pb2.ROLE_ROLLOUT, member_id="hostile-1", address="127.0.0.1:1")
    with grpc.insecure_channel(address) as channel:
        connect = worker_pb2_grpc.WorkerServiceStub(channel).Connect
        answers = connect(iter([worker_pb2.ConnectRequest(hello=hello)]), timeout=30)
        try:
            return next(answers).WhichOneof("directive")
        except grpc.RpcError as error:
            return error.code().name


def answer_to_request(endpoint, member_id):
    """Return the exchange's answer to a request for tasks in the name of a member, without its secret."""
    import zmq

    from paceline.v1 import exchange_pb2 as pb
    from paceline.wire import PROTOCOL

    request = pb.ExchangeRequest(protocol=PROTOCOL, member_id=member_id, term=1, task=pb.TaskRequest(room=1))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        dealer.send(request.SerializeToString())
        if not dealer.poll(30_000):
            return "silence"
        reply = pb.ExchangeReply.FromString(dealer.recv_multipart()[0])
    return f"{pb.ReplyStatus.Name(reply.status)} {reply.message}"


def succeeds(attempt):
    try:
        return bool(attempt())
    except (OSError, subprocess.CalledProcessError):
        return False


def read(path):
    with open(path) as file:
        return file.read()


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def strange_descriptors():
    """Return the files and sockets behind descriptors above standard error, without three sockets: the connection to the service, and
    the pair by which an event loop wakes itself."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
    sockets = [target for number, target in targets if number > 2 and target.startswith("socket:")]
    files = [target for number, target in targets if number > 2 and target.startswith("/") and "/proc/" not in target]
    return [*sockets[3:], *files]


def traced(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(PTRACE_ATTACH, pid, None, None) < 0:
        return False
    os.waitpid(pid, 0x40000000)
    libc.ptrace(PTRACE_DETACH, pid, None, None)
    return True


def connected(name):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + name)
    return True


def written(path):
    with open(path, "x"):
        os.unlink(path)
    return True


def linked(path):
    link = path + ".link"
    os.link(path, link)
    os.unlink(link)
    return True


def moved(folder):
    os.rename(folder, folder + ".moved")
    os.rename(folder + ".moved", folder)
    return True


def pry(completions, log_extra, aims, **columns):
    """A reward function."""
    log_extra("found", ["; ".join(attempts(aims))] * len(completions))
    if "coordinator" in aims:
        log_extra("hello", [answer_to_hello(aims["coordinator"])] * len(completions))
        log_extra("request", [answer_to_request(aims["exchange"], aims["member"])] * len(completions))
    return [0.0] * len(completions)


if __name__ == "__main__":
    import json

    print("\n".join(attempts(json.loads(sys.argv[1]))))
