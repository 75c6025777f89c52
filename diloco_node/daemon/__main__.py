"""`python -m diloco_node.daemon SPEC.json`: the daemon process. `diloco-node start` writes the file and starts it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import structlog
import uvloop

from diloco_node.daemon.daemon import Daemon
from diloco_node.daemon.process import DESCRIPTORS_LOW, keep_freed_memory, raise_descriptor_limit, set_up_logs
from diloco_node.daemon.spec import NodeSpec
from diloco_node.daemon.supervisor import DISK_CODE
from diloco_node.errors import DilocoError, DiskRefused, LedgerGone


def main(arguments: list[str]) -> int:
    """Run the daemon; the exit code."""
    keep_freed_memory()
    descriptors = raise_descriptor_limit()
    set_up_logs()
    log = structlog.get_logger()
    if descriptors < DESCRIPTORS_LOW:
        log.warning(
            "few open files allowed", limit=descriptors, remedy="raise the hard limit: ulimit -Hn, LimitNOFILE="
        )
    if len(arguments) != 1:
        log.error("usage: python -m diloco_node.daemon SPEC.json (written by `diloco-node start`)")
        return 2
    try:
        spec = NodeSpec.load(Path(arguments[0]))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(Daemon(spec).run())
    except DilocoError as error:
        exit_code = DISK_CODE if isinstance(error, DiskRefused | LedgerGone) else error.exit_code
        log.error("stopped", reason=str(error), exit_code=exit_code)
        return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
