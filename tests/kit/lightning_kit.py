"""A trainer of Lightning's that says nothing and writes nothing."""

from pathlib import Path
from typing import Any

import pytest


def quiet_trainer(folder: Path, callback: Any, **arguments: Any) -> Any:
    """Make one with this callback, on the CPU; without an end, unless the arguments name one."""
    lightning = pytest.importorskip("lightning.pytorch")
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[callback],
        **{"max_epochs": -1} | arguments,
    )
