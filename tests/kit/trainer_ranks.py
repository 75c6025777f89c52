"""The built-in trainer on several ranks without a daemon: each of some settings in turn, in one process group.

As a program this is one rank: the settings as JSON on the command line, and on rank 0 what each came to, a line each.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from tests.kit.ports import free_port


def outcomes(ranks: int, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train with each of the settings; of each the `trainer.Outcome` on rank 0, and under "said" its evaluations."""
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", "tests.kit.trainer_ranks", json.dumps(settings)]
    processes = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        # Rank 0 first: the others wait for it in their next step.
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks
    return [json.loads(line) for line in outputs[0].splitlines()]


def serve() -> None:
    """Train."""
    import warnings

    import diloco_node
    from diloco_node.learner.builtin.trainer import Trainer, settings_from

    warnings.filterwarnings("ignore", "DILOCO_SOCKET is not set")
    for model in json.loads(sys.argv[1]):
        lines: list[str] = []
        outcome = Trainer(settings_from({"model": model}), say=lines.append).run(diloco_node.attach)
        if os.environ["RANK"] == "0":
            sys.stdout.write(json.dumps(asdict(outcome) | {"said": lines}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    serve()
