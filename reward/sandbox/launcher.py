"""Limits its own process and becomes the sandboxed program: `python -I -S launcher.py PLAN ARGV...`.

PLAN has lines `NAME VALUE`: `parent` (process id of the starter, or 0 if another program starts this one), `limit`
(`RLIMIT_NAME NUMBER`), `tasks` (tasks that the kernel allows in addition to the user's present ones), `seccomp` (the
filter, hex), `capabilities none`, `landlock` (its ABI), `read`, `file`, `write` and `workspace` (paths, see
`_restrict_files`), and `ready` (the word that begins standard error once everything is applied). Lines may be absent or
repeated. If something cannot be applied, the launcher ends with status 125 before the program starts.

It starts for every program, and a supervisor may have to answer each of its system calls. So it imports only three
modules, and `_ctypes` only for a line that needs the C library; ctypes itself would open ten more files.
"""

import os
import resource
import sys

PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 24, 38, 22
SECCOMP_MODE_FILTER = 2
CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION_3 = 0x20080522
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RULE_PATH_BENEATH = 1
OWN_PID = 0x7FEEDFEE
SIGKILL = 9

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_SOCK, MAKE_BLOCK, IOCTL_DEV = 1 << 6, 1 << 9, 1 << 11, 1 << 15
FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Maps a version of Landlock's ABI to the bits of the rights on files that it has."""
NETWORK_RIGHTS, SCOPES = 0b11, 0b11  # bind and connect by TCP (ABI 4); abstract sockets and signals (ABI 6)
SETUP_FAILED = 125

_functions: dict = {}  # type: ignore[type-arg]
_kinds: dict = {}  # type: ignore[type-arg]
"""Maps names to C functions, and codes to C types. Each entry is added when it is first needed."""


def main() -> None:
    try:
        plan = _read(sys.argv[1])
        apply(plan)
        os.write(2, plan["ready"][0].encode())
    except (OSError, ValueError, LookupError) as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(SETUP_FAILED)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        os.write(2, f"cannot execute {sys.argv[2]!r}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _read(text: str) -> dict[str, list[str]]:
    plan: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        plan.setdefault(name, []).append(value)
    return plan


def apply(plan: dict[str, list[str]]) -> None:
    """Apply the whole plan to this process, the filter of system calls last. Raises OSError."""
    for parent in plan.get("parent", ()):
        _call("prctl", PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent):
            raise OSError("the caller has ended")
    _be_killed_first()
    for tasks in plan.get("tasks", ()):
        if os.getuid():
            _limit(resource.RLIMIT_NPROC, _tasks_of_user() + int(tasks))
    for limit in plan.get("limit", ()):
        name, _, value = limit.partition(" ")
        _limit(getattr(resource, name), int(value))
    if "capabilities" in plan:
        _drop_capabilities()
    if "landlock" in plan or "seccomp" in plan:
        _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for abi in plan.get("landlock", ()):
        paths = (plan.get(name, []) for name in ("read", "file", "write", "workspace"))
        _restrict_files(int(abi), *paths)
    for program in plan.get("seccomp", ()):
        _filter_calls(bytes.fromhex(program))


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _be_killed_first() -> None:
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # a sandbox without /proc


def _tasks_of_user() -> int:
    uid, tasks = os.getuid(), 0
    try:
        numbers = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return 0
    for number in numbers:
        try:
            if os.stat(f"/proc/{number}").st_uid == uid:
                tasks += os.stat(f"/proc/{number}/task").st_nlink - 2
        except OSError:
            continue  # it has ended
    return tasks


def _drop_capabilities() -> None:
    """Drop all capabilities for good; no_new_privs keeps root from regaining them."""
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for number in range(64):
        try:
            _call("prctl", PR_CAPBSET_DROP, number, 0, 0, 0)
        except OSError:
            break  # EINVAL: the kernel knows no more of them; EPERM: there are none to drop
    header = CAPABILITY_VERSION_3.to_bytes(4, sys.byteorder) + bytes(4)
    _call("syscall", CAPSET[os.uname().machine], header, bytes(24))


def _restrict_files(abi: int, read: list[str], files: list[str], write: list[str], workspace: list[str]) -> None:
    """Allow only to read and execute below `read`, to read `files`, to read and write the devices `write`, and to do
    anything below `workspace` except to make device nodes and sockets."""
    handled = max(rights for version, rights in FILE_RIGHTS.items() if version <= abi)
    attributes = [handled, *([NETWORK_RIGHTS] if abi >= 4 else []), *([SCOPES] if abi >= 6 else [])]
    packed = b"".join(each.to_bytes(8, sys.byteorder) for each in attributes)
    ruleset = _call("syscall", CREATE_RULESET, packed, len(packed), 0)
    whole = handled & ~(MAKE_CHAR | MAKE_SOCK | MAKE_BLOCK | IOCTL_DEV)
    for paths, rights in (
        (read, EXECUTE | READ_FILE | READ_DIR),
        (files, READ_FILE),
        (write, READ_FILE | WRITE_FILE),
        (workspace, whole),
    ):
        for path in paths:
            _allow(ruleset, path, rights)
    _call("syscall", RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):
        rights &= EXECUTE | WRITE_FILE | READ_FILE
    rule = rights.to_bytes(8, sys.byteorder) + opened.to_bytes(4, sys.byteorder)
    _call("syscall", ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0)
    os.close(opened)


def _filter_calls(program: bytes) -> None:
    """Load the filter: `struct sock_fprog` is a 16-bit length, padding, and a pointer."""
    own = os.getpid().to_bytes(4, sys.byteorder)
    program = program.replace(OWN_PID.to_bytes(4, sys.byteorder), own)
    length = (len(program) // 8).to_bytes(8, sys.byteorder)
    # `program` must exist until the call below has ended.
    pointer = bytes(memoryview(_value("z", program)).cast("B"))
    _call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, length + pointer, 0, 0)


def _call(name: str, *arguments: int | bytes) -> int:
    """Call a function of the C library. Raises OSError for a negative result."""
    import _ctypes

    if name not in _functions:
        library = _ctypes.dlopen(None, os.RTLD_NOW)  # type: ignore[arg-type]  # None is this program
        flags = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
        returning_int = {"_flags_": flags, "_restype_": type(_value("i", 0))}
        function = type("Function", (_ctypes.CFuncPtr,), returning_int)
        _functions[name] = function(_ctypes.dlsym(library, name))
    values = [_value("z" if isinstance(each, bytes) else "l", each) for each in arguments]
    result = int(_functions[name](*values))
    if result < 0:
        number = _ctypes.get_errno()
        raise OSError(number, f"{name}{arguments[:2]!r:.80}: {os.strerror(number)}")
    return result


def _value(code: str, value: int | bytes):  # type: ignore[no-untyped-def]
    """Return a C value: `i` for an int, `l` for a long, `z` for the address of bytes."""
    import _ctypes

    if code not in _kinds:
        _kinds[code] = type("Value", (_ctypes._SimpleCData,), {"_type_": code})
    return _kinds[code](value)


if __name__ == "__main__":
    main()
