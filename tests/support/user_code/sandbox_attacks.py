"""What hostile code tries in a sandbox, each by its name, and the check that nothing of it reached the outside.

As a program (`python sandbox_attacks.py BACKEND`) it runs every attack and prints {name: {ended, faults, said}} as JSON:
for tests that need a process of their own kind around it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.reward.sandbox.choosing import make_sandbox
from paceline.reward.sandbox.launching import descendants
from paceline.reward.sandbox.protocol import Limits, Outcome, Sandbox

SECRET = "PACELINE-SECRET-7f3a"
ESCAPED = "ESCAPED"

PRELUDE = """
import ctypes, json, os, signal, socket, sys, threading, time
around = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
def escaped(what): print("ESCAPED", what, flush=True)
def refused(error): print("refused:", type(error).__name__, error, flush=True)
def attempt(name, action):
    try:
        result = action()
    except (OSError, MemoryError, RuntimeError) as error:
        return refused(error)
    if result is not False: escaped(f"{name}: {result!r:.60}")
def syscall(*arguments):
    if libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""


@dataclass(frozen=True)
class Attack:
    """One attack: a program, and how a sandbox may end it."""

    program: str
    endings: tuple[str, ...] = ("exited",)
    says: str = ""
    """Text that its output has to hold when it ends by itself: the name of what was refused."""
    time_s: float = 8.0
    x86_64_only: bool = False


ATTACKS = {
    "endless loop": Attack("while True: pass", ("time",), time_s=1),
    "endless sleep": Attack("time.sleep(1e6)", ("time",), time_s=1),
    "ignored signals": Attack(
        "for n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n  except (OSError, ValueError): pass\n"
        "libc.prctl(1, 0, 0, 0, 0)\ntime.sleep(1e6)",
        ("time",),
        time_s=1,
    ),
    "closed outputs": Attack("os.close(1); os.close(2); time.sleep(1e6)", ("time",), time_s=1),
    "fork bomb": Attack("def bomb():\n  while True: os.fork()\nattempt('fork', bomb)", says="refused"),
    "fork bomb by system calls": Attack(
        "def bomb():\n  while True: syscall({'x86_64': 56, 'aarch64': 220}[os.uname().machine], 17, 0, 0, 0, 0)\n"
        "attempt('clone', bomb)\nattempt('clone3', lambda: syscall(435, ctypes.create_string_buffer(88), 88))",
        says="refused",
    ),
    "thread bomb": Attack(
        "threading.stack_size(65536)\nwhile True:\n"
        "  try: threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n"
        "  except (RuntimeError, MemoryError): pass",
        ("processes", "time", "signal"),
        time_s=4,
    ),
    "daemon": Attack(
        "def daemon():\n  if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1e6)\n    os._exit(0)\n"
        "attempt('daemon', daemon)",
        says="refused",
    ),
    "10 GB at once": Attack("attempt('memory', lambda: len(bytearray(10 << 30)))", says="MemoryError"),
    "10 GB bit by bit": Attack(
        "def take():\n  kept = []\n  while len(kept) < 640: kept.append(bytearray(b'x' * (16 << 20)))\n  return len(kept)\n"
        "attempt('memory', take)",
        ("exited", "signal", "memory"),
        says="MemoryError",
    ),
    "memory in shared memory": Attack(
        "attempt('memfd', lambda: os.memfd_create('x'))\n"
        "attempt('/dev/shm', lambda: open('/dev/shm/paceline-attack', 'w').write('x'))\n"
        "attempt('shmget', lambda: syscall(29 if os.uname().machine == 'x86_64' else 194, 0, 1 << 20, 0o1666))",
        says="refused",
    ),
    "TCP to loopback": Attack(
        "attempt('tcp', lambda: socket.create_connection(('127.0.0.1', around['port']), 2))", says="refused"
    ),
    "UDP and DNS": Attack(
        "attempt('dns', lambda: socket.getaddrinfo('example.com', 80))\n"
        "def udp():\n  s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n  s.sendto(b'x', ('127.0.0.1', around['port']))\n"
        "attempt('udp', udp)",
        says="refused",
    ),
    "listening": Attack(
        "def listen():\n  s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen()\nattempt('listen', listen)",
        says="refused",
    ),
    "unix sockets": Attack(
        "def connect(address):\n  s = socket.socket(socket.AF_UNIX); s.settimeout(2); s.connect(address)\n"
        "attempt('abstract', lambda: connect('\\0' + around['abstract']))\n"
        "attempt('path', lambda: connect(around['unix']))\n"
        "def send(address):\n  a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', address)\n"
        "attempt('datagram', lambda: send(around['unix']))",
        says="refused",
    ),
    "the caller's environment": Attack(
        "if around['secret_text'] in repr(os.environ): escaped('environment')\n"
        "for pid in {os.getppid(), around['parent'], 1}:\n"
        "  attempt('environ', lambda: open(f'/proc/{pid}/environ', 'rb').read(40) or False)",
    ),
    "the caller's memory": Attack(
        "class Piece(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]\n"
        "here = ctypes.create_string_buffer(8)\n"
        "for pid in {os.getppid(), around['parent']}:\n"
        "  if pid in (0, os.getpid()): continue\n"
        "  attempt('mem', lambda: open(f'/proc/{pid}/mem', 'rb'))\n"
        "  number = 310 if os.uname().machine == 'x86_64' else 270\n"
        "  mine, theirs = Piece(ctypes.addressof(here), 8), Piece(around['address'], 8)\n"
        "  attempt('readv', lambda: syscall(number, pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0))",
        says="refused",
    ),
    "reading outside": Attack(
        "for path in (around['secret'], '/etc/shadow', '/etc/passwd', os.path.expanduser('~root'), '/proc/1/maps', '/home', '/var/lib'):\n"
        "  attempt('read', lambda: os.listdir(path) if os.path.isdir(path) else open(path).read())",
        says="refused",
    ),
    "writing outside": Attack(
        "import site\n"
        "for folder in (around['outside'], '/tmp', '/var/tmp', '/dev/shm', os.path.dirname(os.__file__), '/usr/bin'):\n"
        "  attempt('write', lambda: open(os.path.join(folder, 'paceline-attack'), 'w').write('x'))\n"
        "attempt('truncate', lambda: os.truncate(around['secret'], 0))\n"
        "attempt('unlink', lambda: os.unlink(around['secret']))\n"
        "attempt('rename', lambda: os.rename(around['secret'], 'mine'))\n"
        "attempt('link', lambda: os.link(around['secret'], 'mine'))\n"
        "try: os.chmod(around['secret'], 0o777); os.utime(around['secret'], (1, 1))\n"
        "except OSError as error: refused(error)",
        says="refused",
    ),
    "1 GB of output": Attack("while True: print('x' * 1000)", ("output",)),
    "1 GB of errors": Attack("while True: os.write(2, b'x' * 65536)", ("output",)),
    "a full disk by one file": Attack(
        "def fill():\n  f = open('big', 'wb', buffering=0)\n  while f.tell() < 300 << 20: f.write(b'x' * (1 << 20))\n"
        "attempt('fill', fill)",
        ("exited", "disk"),
        says="refused",
    ),
    "a full disk by many files": Attack(
        "def fill():\n  for n in range(300):\n    open(f'big{n}', 'wb').write(b'x' * (1 << 20))\n    time.sleep(0.005)\n"
        "attempt('fill', fill)",
        ("exited", "disk"),
        says="refused",
    ),
    "a full disk by files without names": Attack(
        "kept = []\ndef fill():\n  for n in range(50):\n    f = open('big', 'wb', buffering=0); os.unlink('big'); kept.append(f)\n"
        "    for _ in range(16): f.write(b'x' * (1 << 20)); time.sleep(0.005)\nattempt('fill', fill)",
        ("exited", "disk"),
        says="refused",
    ),
    "a zip bomb": Attack(
        "import zlib\npacked = zlib.compressobj(9)\npiece = packed.compress(bytes(64 << 20)) + packed.flush()\n"
        "def unpack():\n  kept = [zlib.decompress(piece) for _ in range(160)]\nattempt('memory', unpack)",
        ("exited", "memory"),
        says="MemoryError",
        time_s=20,
    ),
    "a million empty files": Attack(
        "def fill():\n  for n in range(1000000): os.close(os.open(f'f{n}', os.O_CREAT | os.O_WRONLY))\nattempt('fill', fill)",
        ("exited", "disk"),
        says="refused",
        time_s=60,
    ),
    "links to the outside": Attack(
        "os.symlink(around['outside'], 'door'); os.symlink(around['secret'], 'glass')\n"
        "attempt('through a link', lambda: open('glass').read())\n"
        "attempt('into a folder', lambda: open('door/paceline-attack', 'w').write('x'))\n"
        "end = time.monotonic() + 0.5\n"
        "def swap():\n  while time.monotonic() < end:\n    for target in ('own', around['secret']):\n"
        "      try: os.symlink(target, 'next'); os.replace('next', 'raced')\n"
        "      except OSError: pass\n"
        "open('own', 'w').write('mine'); threading.Thread(target=swap).start()\n"
        "while time.monotonic() < end:\n"
        "  try: text = open('raced').read()\n"
        "  except OSError: continue\n"
        "  if around['secret_text'] in text: escaped('race')\n"
        "os.symlink(around['outside'], 'deep')",
        says="refused",
    ),
    "folders that resist removal": Attack(
        "os.mkdir('closed'); open('closed/file', 'w').close(); os.mkdir('closed/inner', 0)\n"
        "os.symlink(around['outside'], 'closed/door')\nlibc.umask(0o777)\nos.mkdir('shut')\nlibc.umask(0)\n"
        "for n in range(3000):\n  try: os.mkdir('d'); os.chdir('d')\n  except OSError as error: refused(error); break",
        ("exited", "disk"),
    ),
    "signals to others": Attack(
        "for pid in {os.getppid(), around['parent']}:\n"
        "  if pid in (0, 1, os.getpid()): continue\n"
        "  attempt('kill', lambda: os.kill(pid, signal.SIGUSR1))\n"
        "attempt('kill all', lambda: os.kill(-1, signal.SIGUSR1) or False)\n"
        "attempt('kill the group', lambda: os.kill(0, 0) or False)",
    ),
    "ptrace": Attack(
        "number = 101 if os.uname().machine == 'x86_64' else 117\n"
        "for pid in {os.getppid(), around['parent']} - {0}:\n"
        "  attempt('attach', lambda: syscall(number, 16, pid, 0, 0)); attempt('seize', lambda: syscall(number, 0x4206, pid, 0, 0))",
        says="refused",
    ),
    "io_uring, bpf and other doors": Attack(
        "for name, call in dict(io_uring=(425, 8, ctypes.create_string_buffer(256)), bpf=(321, 0, ctypes.create_string_buffer(128), 128),\n"
        "    perf=(298, ctypes.create_string_buffer(128), 0, -1, -1, 0), userfaultfd=(323, 1), keyctl=(250, 0, -3, 1),\n"
        "    unshare=(272, 0x10000000), setns=(308, 0, 0), mount=(165, b'x', b'/', b'tmpfs', 0, 0), chroot=(161, b'.'), pidfd_open=(434, os.getppid() or 1, 0),\n"
        "    open_by_handle=(304, -100, ctypes.create_string_buffer(16), 0), reboot=(169, 1, 2, 3, 0), kexec=(246, 0, 0, 0, 0)).items():\n"
        "  attempt(name, lambda: syscall(*call))",
        says="refused",
        x86_64_only=True,
    ),
    "higher limits": Attack(
        "import resource\n"
        "for name in ('RLIMIT_AS', 'RLIMIT_FSIZE', 'RLIMIT_NOFILE', 'RLIMIT_CPU'):\n"
        "  kind = getattr(resource, name); soft, hard = resource.getrlimit(kind)\n"
        "  if hard == resource.RLIM_INFINITY: escaped(name)\n"
        "  try: resource.setrlimit(kind, (hard + 1, hard + 1)); escaped(name)\n"
        "  except (OSError, ValueError) as error: refused(error)\n"
        "attempt('prlimit of the caller', lambda: resource.prlimit(around['parent'], resource.RLIMIT_CORE, (0, 0)))",
        says="refused",
    ),
    "another user": Attack(
        "attempt('setuid', lambda: os.setuid(1234)); attempt('setgroups', lambda: os.setgroups([0]))\n"
        "attempt('mknod', lambda: os.mknod('disk', 0o60666, os.makedev(8, 0)))",
        says="refused",
    ),
    "terminal input": Attack(
        "import fcntl\nattempt('TIOCSTI', lambda: fcntl.ioctl(0, 0x5412, b'x'))\n"
        "attempt('SIGIO to the caller', lambda: fcntl.fcntl(0, 8, around['parent']))",
        says="refused",
    ),
}


@dataclass
class Surroundings:
    """What an attack could reach: a secret, a folder, listeners, this process."""

    folder: Path
    told: dict[str, object]
    reached: list[str]
    """What arrived from a program: connections and signals."""

    @property
    def secret(self) -> Path:
        return self.folder / "outside" / "secret"

    def faults(self, outcome: Outcome, attack: Attack) -> list[str]:
        """What the attack has achieved, in words; empty where it was contained."""
        said = (outcome.stdout + outcome.stderr).decode(errors="replace")
        found = [line for line in said.splitlines() if line.startswith(ESCAPED)] + self.reached
        if outcome.ended not in attack.endings:
            found.append(f"{outcome.describe()}: {said[-300:]}")
        if outcome.ended == "exited" and (outcome.exit_code != 0 or attack.says not in said):
            found.append(f"it does not say {attack.says!r}: {said[-300:]}")
        state = self.secret.stat()
        if self.secret.read_text() != SECRET or state.st_mode & 0o777 != 0o644 or state.st_mtime < 10:
            found.append("the secret was changed")
        if [path.name for path in self.secret.parent.iterdir()] != ["secret"]:
            found.append("a file was left outside")
        if left := list((self.folder / "tmp").iterdir()):
            found.append(f"{left} was left")
        if left := [pid for pid in descendants(os.getpid()) if pid != os.getpid() and not _is_ours(pid)]:
            found.append(f"processes {left} were left")
        if max(len(outcome.stdout), len(outcome.stderr)) > Limits().output_bytes:
            found.append("more output than its bound")
        self.reached.clear()
        return found


OURS: set[int] = set()


def _is_ours(pid: int) -> bool:
    """Children that were there before, and those that end by themselves (zombies of a sandbox's own threads)."""
    try:
        return pid in OURS or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@contextmanager
def surroundings(folder: Path) -> Iterator[Surroundings]:
    """Something to attack, in `folder`. Temporary folders are made inside it meanwhile."""
    OURS.update(descendants(os.getpid()))
    (folder / "outside").mkdir()
    (folder / "tmp").mkdir()
    secret = folder / "outside" / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o644)
    (folder / "outside").chmod(0o777)
    os.environ["PACELINE_ATTACKED"] = SECRET
    reached: list[str] = []
    before, tempfile.tempdir = tempfile.tempdir, str(folder / "tmp")
    handlers = {number: signal.signal(number, lambda n, _: reached.append(f"signal {n}")) for number in (10, 12)}
    kept = b"memory of the caller"
    listeners = _listeners(folder)
    threads = [threading.Thread(target=_accept, args=(each, reached), daemon=True) for each in listeners]
    for thread in threads:
        thread.start()
    told = {
        "parent": os.getpid(),
        "port": listeners[0].getsockname()[1],
        "unix": str(folder / "socket"),
        "abstract": f"paceline-{os.getpid()}",
        "secret": str(secret),
        "outside": str(secret.parent),
        "secret_text": SECRET,
        "address": id(kept),
    }
    try:
        yield Surroundings(folder, told, reached)
    finally:
        tempfile.tempdir = before
        del os.environ["PACELINE_ATTACKED"]
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for listener in listeners:
            listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for listener in listeners:
            listener.close()


def _listeners(folder: Path) -> list[socket.socket]:
    tcp, unix, abstract = socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    tcp.bind(("127.0.0.1", 0))
    unix.bind(str(folder / "socket"))
    (folder / "socket").chmod(0o777)
    abstract.bind(f"\0paceline-{os.getpid()}")
    for listener in (tcp, unix, abstract):
        listener.listen()
    return [tcp, unix, abstract]


def _accept(listener: socket.socket, reached: list[str]) -> None:
    while True:
        try:
            listener.accept()[0].close()
        except OSError:
            return
        reached.append(f"a connection to {listener.family.name}")


def run_attack(sandbox: Sandbox, attack: Attack, around: Surroundings) -> Outcome:
    """Run one attack and return its outcome."""
    program = (PRELUDE + attack.program + "\nprint('the end')\n").encode()
    return sandbox.run(
        ["python", "attack.py", json.dumps(around.told)], {"attack.py": program}, Limits(time_s=attack.time_s)
    )


def main(backend: str) -> None:
    """Run every attack on `backend` and print what became of each."""
    sandbox = make_sandbox(backend)
    report: dict[str, object] = {"backend": sandbox.name, "uid": os.getuid()}
    for name, attack in ATTACKS.items():
        if attack.x86_64_only and os.uname().machine != "x86_64":
            continue
        with tempfile.TemporaryDirectory() as folder, surroundings(Path(folder)) as around:
            outcome = run_attack(sandbox, attack, around)
            faults = around.faults(outcome, attack)
        said = (outcome.stdout + outcome.stderr)[-200:].decode(errors="replace")
        report[name] = {"ended": outcome.ended, "faults": faults, "said": said}
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
