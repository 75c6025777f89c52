"""`python row_log.py FOLDER SCRIPT ARGUMENTS`: run a training script on numbered rows, and note those of each step.

The scripts in `examples/` learn Python's standard library: here that is one file in FOLDER, made by `write_text`. What
an embedding sees in training goes to FOLDER/rows.log before the optimizer's step, so a killed process has noted it all.
"""

import hashlib
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

ROW_BYTES = 64
PACE_S = 0.02
"""A step takes so long at least: some hundred of them are between two checkpoints, not thousands."""


def write_text(folder: Path, rows: int) -> None:
    """So many rows, no two of them equal."""
    folder.mkdir()
    (folder / "text.py").write_text("".join(f"{number:08d}" for number in range(rows * ROW_BYTES // 8)))


def read_lives(folder: Path) -> list[tuple[int, list[str]]]:
    """Of each process, its pid, and the rows of each step in a text."""
    lives: list[tuple[int, list[str]]] = []
    path = folder / "rows.log"
    for line in path.read_text().splitlines() if path.exists() else ():
        word, _, rest = line.partition(" ")
        if word == "life":
            lives.append((int(rest), []))
        else:
            lives[-1][1].append(rest)
    return lives


def main() -> None:
    """See the module."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from diloco_node.learner import checkpointing

    checkpointing.COST_PART = 1.0  # type: ignore[misc] # a slow disk would have one a minute
    folder = Path(sys.argv[1])
    sys.argv = sys.argv[2:]
    os.__file__ = str(folder / "os.py")
    log = os.open(folder / "rows.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, f"life {os.getpid()}\n".encode())
    names: list[str] = []
    within: list[str] = []

    def note_rows(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding) and module.training:
            names.extend(hashlib.sha256(row.numpy().tobytes()).hexdigest()[:12] for row in inputs[0])
            if within:
                write()

    def write() -> None:
        os.write(log, f"step {' '.join(names)}\n".encode())
        names.clear()
        time.sleep(PACE_S)

    def begin_step(*_: Any) -> None:
        if names:
            write()
        else:  # a step that calls the model by itself, as Lightning's, or one that only makes the optimizer's state
            within.append("step")

    def end_step(*_: Any) -> None:
        within.clear()

    register_module_forward_pre_hook(note_rows)
    register_optimizer_step_pre_hook(begin_step)
    register_optimizer_step_post_hook(end_step)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
