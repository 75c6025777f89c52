"""`python -m diloco_node.learner`: the built-in trainer, attached to the daemon at `DILOCO_SOCKET`, or alone."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from diloco_node.errors import DilocoError
from diloco_node.learner.attach import attach
from diloco_node.learner.builtin.trainer import Trainer, read_settings_file, settings_from


def main() -> int:
    """Train until told to stop; print the outcome as one line of JSON. Returns the exit code."""
    try:
        trainer = Trainer(settings_from(read_settings_file()))
        outcome = trainer.run(attach)
    except DilocoError as problem:
        sys.stderr.write(f"learner: {problem}\n")
        return problem.exit_code
    except KeyboardInterrupt:
        return 0
    if trainer.place.rank == 0:
        sys.stdout.write(json.dumps(asdict(outcome), allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
