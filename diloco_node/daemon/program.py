"""The daemon process, from its specification to its exit code."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import structlog
import uvloop

from diloco_node.daemon.console import ConsoleHandler, console_line
from diloco_node.daemon.daemon import Daemon
from diloco_node.daemon.logs import set_up_logs
from diloco_node.daemon.process_setup import DESCRIPTORS_LOW, keep_freed_memory, raise_descriptor_limit
from diloco_node.daemon.spec import NodeSpec
from diloco_node.daemon.stopping import StopDeadline
from diloco_node.errors import DilocoError, DiskRefused, LedgerGone
from diloco_node.supervisor.supervisor import DISK_CODE


def run_daemon(arguments: list[str]) -> int:
    """Run the daemon; the exit code. arguments: SPEC.json, which `diloco-node start` writes."""
    keep_freed_memory()
    descriptors = raise_descriptor_limit()
    set_up_logs()
    if len(arguments) != 1:
        structlog.get_logger().error("usage: python -m diloco_node.daemon SPEC.json (written by `diloco-node start`)")
        return 2
    region, deadline = "daemon", None
    try:
        spec = NodeSpec.load(Path(arguments[0]))
        region = spec.region
        set_up_logs(spec.log_level, spec.log_format)
        logging.getLogger("diloco_node").addHandler(ConsoleHandler(region))
        if descriptors < DESCRIPTORS_LOW:
            structlog.get_logger().warning(
                "few open files allowed", limit=descriptors, remedy="raise the hard limit: ulimit -Hn, LimitNOFILE="
            )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            deadline = StopDeadline(region)
            return runner.run(Daemon(spec, deadline.arm).run())
    except DilocoError as error:
        exit_code = DISK_CODE if isinstance(error, DiskRefused | LedgerGone) else error.exit_code
        if deadline is not None:
            deadline.code = exit_code
        structlog.get_logger().error("stopped", reason=str(error), exit_code=exit_code)
        console_line(region, f"stopped: {error}")
        return exit_code
