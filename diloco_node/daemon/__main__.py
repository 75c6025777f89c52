"""`python -m diloco_node.daemon SPEC.json`: the daemon process. `diloco-node start` writes the file and starts it."""

from __future__ import annotations

import sys

from diloco_node.daemon.process_setup import importing


def main(arguments: list[str]) -> int:
    """Run the daemon; the exit code."""
    with importing():
        from diloco_node.daemon.program import run_daemon
    return run_daemon(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
