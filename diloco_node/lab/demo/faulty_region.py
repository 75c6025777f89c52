"""`python -m diloco_node.lab.demo.faulty_region start ...`: `diloco-node start` with a daemon that takes faults.

A demo starts its regions so. `diloco-node start` itself starts a daemon that looks for no faults.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_node.lab.chaos.fault_files import FAULTS_VARIABLE

if TYPE_CHECKING:
    from diloco_node.config.resolve import NodeConfig
    from diloco_node.supervisor.supervisor_spec import SupervisorSpec


def main(arguments: list[str]) -> int:
    """Become the region's supervisor (`start ...`), or its daemon (`daemon SPEC.json`)."""
    if arguments[:1] == ["daemon"]:
        return run_daemon(arguments[1:])
    return run_start(arguments, ("-m", __spec__.name, "daemon"))


def run_start(arguments: list[str], daemon: Sequence[str]) -> int:
    """`diloco-node start ...` with another program as its daemon: what Python is to run. The exit code."""
    from diloco_node.cli import start
    from diloco_node.cli.program import operator_app, run

    prepare = start.prepare

    def prepare_other(config: NodeConfig, region: str, command: Sequence[str]) -> SupervisorSpec:
        spec = prepare(config, region, command)
        at = spec.daemon_command.index("diloco_node.daemon")
        spec.daemon_command[at - 1 : at + 1] = daemon
        return spec

    start.prepare = prepare_other
    return run(operator_app(), arguments)


def run_daemon(arguments: list[str]) -> int:
    """The daemon with its faults; the exit code."""
    from diloco_node.daemon.process_setup import importing

    with importing():
        from diloco_node.daemon import program
        from diloco_node.daemon.spec import NodeSpec
        from diloco_node.lab.chaos.daemon_faults import install
    install(Path(os.environ[FAULTS_VARIABLE]), NodeSpec.load(Path(arguments[0])).region)
    return program.run_daemon(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
