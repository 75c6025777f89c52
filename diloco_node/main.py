"""The command `diloco-node`: the operator's commands and the laboratory's.

Exit codes: 0 ok, 1 runtime, 2 usage or settings, 3 cannot bind, 4 identity, 5 peers unreachable, 6 state or disk,
7 superseded or version mismatch. An error is one line on standard error, its code at the end; `--debug` shows the
traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from diloco_node.cli.application import operator_app, run
from diloco_node.cli.examples import add_examples
from diloco_node.lab.cli.commands import add_laboratory

app = operator_app()
add_laboratory(app)
add_examples(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; None: that of the process. Returns the exit code."""
    return run(app, arguments)


if __name__ == "__main__":
    sys.exit(main())
