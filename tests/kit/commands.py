"""The commands of the program as their users run them: in a process of their own."""

import subprocess
import sys
from typing import Any

COMMAND = (sys.executable, "-m", "diloco_node.main")
"""The words before a command's own; it runs in the same Python."""

NO_FORK_SERVER = {"DILOCO_LEARNER__PRELOAD": ""}
"""Environment of regions whose learners need not come back quickly: no second process of each imports torch."""

SMALL_MODEL = {"DILOCO_MODEL__DIM": "16", "DILOCO_MODEL__HEADS": "2", "DILOCO_MODEL__BATCH": "2"}
"""Environment of regions of which nobody asks how well they learn: a step takes a quarter of a demo's."""


def run_command(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, which may be a failure. `options` are those of `subprocess.run`."""
    arguments: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "check": False, **options}
    return subprocess.run([*COMMAND, *words], **arguments)
