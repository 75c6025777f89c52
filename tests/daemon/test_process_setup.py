"""Garbage collector, allocator and open files: in a process of its own, for they hold for the whole process."""

import resource
import subprocess
import sys

import pytest

from diloco_node.daemon.process_setup import HEAP_BLOCK_BYTES_MAX

PROBE = """
import ctypes, resource, sys
from diloco_node.daemon.process_setup import keep_freed_memory
if sys.argv[1] == "kept" and not keep_freed_memory():
    sys.exit(3)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)
size = int(sys.argv[2])
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[-1])
"""


def faults_of_a_block(mode: str, size_bytes: int) -> int:
    """Page faults for taking, writing and freeing a block for the sixth time."""
    command = [sys.executable, "-c", PROBE, mode, str(size_bytes)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    if process.returncode == 3:
        pytest.skip("the C library is not glibc")
    assert process.returncode == 0, process.stderr
    return int(process.stdout)


def test_a_block_that_was_freed_is_used_again_without_asking_the_kernel() -> None:
    size_bytes = HEAP_BLOCK_BYTES_MAX - 2**20
    assert faults_of_a_block("kept", size_bytes) <= 16


def test_larger_blocks_go_back_to_the_kernel() -> None:
    size_bytes = 2 * HEAP_BLOCK_BYTES_MAX
    assert faults_of_a_block("kept", size_bytes) >= 16


LIMITS = """
import resource, sys
from diloco_node.daemon.process_setup import raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "limit"), [(64, 900, 900), (700, 700, 700), (128, 2**17, 2**16)])
def test_the_limit_of_open_files_is_raised_as_far_as_it_makes_sense(soft: int, hard: int, limit: int) -> None:
    if hard > resource.getrlimit(resource.RLIMIT_NOFILE)[1]:
        pytest.skip("this system allows less")
    command = [sys.executable, "-c", LIMITS, str(soft), str(hard)]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert process.stdout.split() == [str(limit), str(limit), str(hard)]


COLLECTOR = """
import gc
from diloco_node.daemon.process_setup import importing
with importing():
    inside = gc.isenabled()
    kept = [[] for _ in range(1000)]
print(inside, gc.isenabled(), gc.get_freeze_count() >= 1000)
try:
    with importing():
        raise ImportError
except ImportError:
    print(gc.isenabled())
"""


def test_the_garbage_collector_leaves_alone_what_was_imported() -> None:
    process = subprocess.run(
        [sys.executable, "-c", COLLECTOR], capture_output=True, text=True, timeout=240, check=False
    )
    assert process.stdout == "False True True\nTrue\n", process.stderr
