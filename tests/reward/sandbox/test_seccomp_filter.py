"""The filter's decisions, by an interpreter of the instructions that it uses."""

from __future__ import annotations

import errno
import struct

import pytest

from paceline.errors import InvalidInput
from paceline.reward.sandbox.seccomp_filter import (
    ALLOWED,
    ARCHITECTURES,
    CONDITIONAL,
    IGNORED,
    OWN_PID,
    REFUSED,
    UNSUPPORTED,
    build_filter,
)

ALLOW, KILL = "allow", "kill"


def decide(machine: str, number: int, *arguments: int, single: bool = True, arch: int | None = None) -> str:
    """What the kernel would do with a call: allow, kill, or the name of the error."""
    program = build_filter(machine, single)
    data = struct.pack(
        "=iIQ6Q", number, arch or ARCHITECTURES[machine][1], 0, *(*arguments, *[0] * (6 - len(arguments)))
    )
    position, value = 0, 0
    while True:
        code, if_true, if_false, k = struct.unpack_from("=HBBI", program, 8 * position)
        position += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("=I", data, k)
            case 0x54:
                value &= k
            case 0x15:
                position += if_true if value == k else if_false
            case 0x35:
                position += if_true if value >= k else if_false
            case 0x45:
                position += if_true if value & k else if_false
            case 0x06:
                action, answer = k & 0x7FFF0000, k & 0xFFFF
                if k == 0x80000000:
                    return KILL
                return ALLOW if action == 0x7FFF0000 else errno.errorcode.get(answer, "nothing")
            case _:
                raise AssertionError(f"instruction {code:#x}")


@pytest.fixture(params=ARCHITECTURES)
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def call(machine: str, name: str) -> int:
    for table in (ALLOWED, CONDITIONAL, REFUSED, IGNORED, UNSUPPORTED):
        if name in table:
            number = table[name][ARCHITECTURES[machine][0]]
            assert number is not None
            return number
    raise AssertionError(name)


def test_each_table_has_its_answer(machine: str) -> None:
    column = ARCHITECTURES[machine][0]
    for table, answer in (
        (ALLOWED, ALLOW),
        (REFUSED, "EPERM"),
        (IGNORED, "nothing"),
        (UNSUPPORTED, errno.errorcode[errno.EOPNOTSUPP]),
    ):
        for name, numbers in table.items():
            number = numbers[column]
            if number is not None:
                assert (name, decide(machine, number)) == (name, answer)


def test_calls_that_no_table_has_are_not_there(machine: str) -> None:
    assert {decide(machine, number) for number in (470, 1000, 0x3FFFFFFF)} == {"ENOSYS"}


def test_no_number_stands_twice(machine: str) -> None:
    column = ARCHITECTURES[machine][0]
    tables = (ALLOWED, CONDITIONAL, REFUSED, IGNORED, UNSUPPORTED)
    numbers = [n[column] for table in tables for n in table.values() if n[column] is not None]
    assert len(numbers) == len(set(numbers))


def test_foreign_architectures_are_killed_and_x32_is_not_there() -> None:
    assert decide("x86_64", 0, arch=0x40000003) == KILL
    assert decide("x86_64", 0x40000000) == "ENOSYS"


def test_threads_are_allowed_and_processes_are_not(machine: str) -> None:
    clone = call(machine, "clone")
    assert decide(machine, clone, 0x3D0F00) == ALLOW  # the flags of a pthread
    assert decide(machine, clone, 17) == "EPERM"  # those of fork
    assert decide(machine, call(machine, "clone3")) == "ENOSYS"


def test_with_several_processes_fork_is_allowed_and_namespaces_are_not(machine: str) -> None:
    clone = call(machine, "clone")
    assert decide(machine, clone, 17, single=False) == ALLOW
    for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000):
        assert decide(machine, clone, 17 | flag, single=False) == "EPERM"


def test_signals_reach_the_program_alone(machine: str) -> None:
    for name in ("kill", "tgkill", "rt_sigqueueinfo"):
        assert decide(machine, call(machine, name), OWN_PID, 9) == ALLOW
        for pid in (1, 0, 0xFFFFFFFF, OWN_PID + 1):
            assert decide(machine, call(machine, name), pid, 9) == "EPERM"


def test_only_stream_pairs_of_sockets(machine: str) -> None:
    pair = call(machine, "socketpair")
    assert decide(machine, pair, 1, 1 | 0o2000000) == ALLOW
    assert decide(machine, pair, 1, 2) == "EPERM"
    assert decide(machine, pair, 2, 1) == "EPERM"


def test_arguments_of_prctl_prlimit_ioctl_and_fcntl(machine: str) -> None:
    assert decide(machine, call(machine, "prctl"), 15) == ALLOW
    assert decide(machine, call(machine, "prctl"), 1) == "EPERM"  # PR_SET_PDEATHSIG
    assert decide(machine, call(machine, "prlimit64"), 0) == ALLOW
    assert decide(machine, call(machine, "prlimit64"), 1234) == "EPERM"
    assert decide(machine, call(machine, "ioctl"), 0, 0x5401) == ALLOW
    assert decide(machine, call(machine, "ioctl"), 0, 0x5412) == "EPERM"
    assert decide(machine, call(machine, "fcntl"), 0, 3) == ALLOW
    assert decide(machine, call(machine, "fcntl"), 0, 8) == "EPERM"


def test_unknown_architectures_are_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="riscv64"):
        build_filter("riscv64", True)
