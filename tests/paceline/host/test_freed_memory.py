"""Handling of freed memory by glibc, each case in a separate process, because the settings are permanent."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")

PROGRAM = """
import ctypes, sys
from pathlib import Path
from paceline.host import resources as freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def anonymous_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) / 1024

def filled(mb):
    block = libc.malloc(mb << 20)
    ctypes.memset(block, 1, mb << 20)
    return block

getattr(freed_memory, sys.argv[1], lambda: None)()
before_mb = anonymous_mb()
libc.free(filled(20))  # by default glibc maps no block of up to this size any more
block = filled(19)
above = libc.malloc(4096)  # lies behind it in the heap
libc.free(block)
kept_mb = anonymous_mb() - before_mb
freed_memory.give_freed_memory_back()
print(kept_mb > 15, anonymous_mb() - before_mb > 15)
"""


@pytest.mark.parametrize(
    ("setting", "is_kept"), [("none", True), ("keep_freed_memory", True), ("return_large_tensors", False)]
)
def test_a_large_freed_block_is_kept_or_returned(setting: str, is_kept: bool) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, setting], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(is_kept), "False"]
