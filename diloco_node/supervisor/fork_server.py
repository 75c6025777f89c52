"""The process that a region's learners are forked from: it has imported what they import, and done nothing else.

A fork of a process that has imported torch runs its first line within 0.1 s, not after seconds. The supervisor starts
this file with the interpreter and the environment of the learner's command, and sends one order per start:

    python [OPTIONS] fork_server.py SOCKET SUPERVISOR MODULES -- SCRIPT [ARGUMENTS]      or:  ... -- -m MODULE [...]

A fork is sound only while this process has one thread and no device: both are looked at after each import, and a module
that breaks this is refused by name. Then learners are started afresh.

A learner is forked twice. The process between ends at once, so the kernel gives the learner to the supervisor, which is
the nearest subreaper for that moment. Then it is a child of the supervisor like any other.

The conversation, in packets of JSON: `{"ready": seconds}` or `{"error": ...}` once; then for each order, which brings
two descriptors, `{"pid": ...}` or `{"error": ...}`. The first descriptor is the learner's output. The learner begins
when it reads a byte from the second, and ends when that is closed first: nobody waits for it any more.

Standard library only, and imported by nothing: it is a program. Its imports are in the learner, too.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
USAGE_CODE: Final = 2

ORDER: Final = b"fork"
PID_BYTES_MAX: Final = 16
DEVICES: Final = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/neuron", "/dev/vfio/", "/dev/dxg")
"""Drivers' devices: NVIDIA, AMD, Intel, TPU, Trainium, any in Windows' Linux. Their state does not survive a fork."""


def preload(modules: Sequence[str]) -> str:
    """Import them in this order. Returns why a learner can't be forked after that; empty if it can."""
    for name in modules:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a module does when it is imported
            return f"can't import {name!r} ({type(error).__name__}: {error})"
        problem = fork_problem()
        if problem:
            return f"importing {name!r} {problem}"
    return ""


def fork_problem() -> str:
    """Say why a fork of this process is unsound, as the end of a sentence; empty if it is not."""
    # Libraries that know about forks end their threads before one (OpenBLAS does); those of the others stay.
    trial = os.fork()
    if trial == 0:
        os._exit(0)
    os.waitpid(trial, 0)
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    names = [(task / "comm").read_text().strip() for task in tasks]
    if names:
        return f"started threads ({', '.join(sorted(names)[:5])}), which a fork would lack"
    devices = sorted(path for path in map(_link, Path("/proc/self/fd").iterdir()) if path.startswith(DEVICES))
    return f"opened the device {devices[0]}, which a fork can't use" if devices else ""


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:  # the descriptor of the listing itself
        return ""


def die_with_parent(number: int, parent: int) -> None:
    """Get this signal when the parent dies; end at once if it is dead already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def serve(orders: socket.socket, supervisor: int) -> None:
    """Fork a learner at each order. Returns in the learners; in this process it ends with the supervisor."""
    while True:
        try:
            order, fds, _, _ = socket.recv_fds(orders, len(ORDER), 2, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            os._exit(0)
        if order != ORDER or len(fds) != 2:
            os._exit(0)  # the supervisor has closed its end, or is gone
        output, go = fds
        try:
            pid = _fork_orphan()
        except OSError as error:
            answer: dict[str, int | str] = {"error": f"can't fork: {error.strerror}"}
        else:
            if pid == 0:
                _become_learner(orders, output, go, supervisor)
                return
            answer = {"pid": pid} if pid > 0 else {"error": "can't fork twice"}
        os.close(output)
        os.close(go)
        try:
            orders.send(json.dumps(answer).encode())
        except OSError:
            os._exit(0)


def _fork_orphan() -> int:
    """The number of a process whose parent is gone; 0 in that process; -1 if it could not be made."""
    born_read, born_write = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            if os.fork() > 0:
                os._exit(0)
            # Before anybody hears of it: the supervisor signals the group, and lowers the session's priority.
            os.setsid()
            os.write(born_write, str(os.getpid()).encode())
        except OSError:
            os._exit(1)
        os.close(born_read)
        os.close(born_write)
        return 0
    os.close(born_write)
    # When this returns the kernel has given the learner to its new parent.
    os.waitpid(between, 0)
    born = os.read(born_read, PID_BYTES_MAX)
    os.close(born_read)
    return int(born) if born else -1


def _become_learner(orders: socket.socket, output: int, go: int, supervisor: int) -> None:
    """Wait for the supervisor's word; then everything is as after a fresh start, but for what is imported."""
    orders.close()
    is_wanted = os.read(go, 1)
    os.close(go)
    if not is_wanted:
        os._exit(0)
    # As the supervisor's other way to start it: a launcher of ranks can take them along.
    die_with_parent(signal.SIGTERM, supervisor)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # As these modules do when they are imported; Python's own generator does it by itself after a fork.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def set_arguments(command: Sequence[str]) -> None:
    """Make `sys.argv`, `sys.orig_argv` and the first of `sys.path` what they are when this command is started."""
    options = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv)]
    sys.orig_argv = [*options, *command]
    is_module = command[0] == "-m"
    sys.argv = ["-m", *command[2:]] if is_module else list(command)
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd() if is_module else Path(command[0]).resolve().parent)


def run(command: Sequence[str]) -> None:
    """Run a script, or "-m" and a module, as `__main__`. Its exceptions end the process, as ever."""
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main_module
    if command[0] == "-m":
        # The function that `python -m` itself calls.
        runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]
        return
    script = str(Path.cwd() / command[0])
    loader = SourceFileLoader("__main__", script)
    main_module.__file__, main_module.__loader__ = script, loader
    try:
        source = loader.get_data(script)
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {script!r}: {error}\n")
        raise SystemExit(USAGE_CODE) from None
    exec(compile(source, script, "exec", dont_inherit=True), main_module.__dict__)


def main() -> None:
    """Run the fork server. Returns only in a learner, where its command has come to its end."""
    end = sys.argv.index("--")
    descriptor, supervisor, modules, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:end], sys.argv[end + 1 :]
    die_with_parent(signal.SIGKILL, supervisor)
    orders = socket.socket(fileno=descriptor)
    orders.set_inheritable(False)
    set_arguments(command)
    started_s = time.monotonic()
    # The garbage collector would walk again and again over what is being imported, and that stays anyway.
    gc.disable()
    problem = preload(modules)
    # The learners' collector leaves it alone, too: looking at it would copy its pages in each of them.
    gc.freeze()
    gc.enable()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        orders.send(json.dumps({"error": problem} if problem else {"ready": time.monotonic() - started_s}).encode())
    except OSError:
        os._exit(0)
    if problem:
        os._exit(1)
    serve(orders, supervisor)
    run(command)


if __name__ == "__main__":
    main()
