"""The tensors of a run as a torch.distributed.checkpoint, for `dcp.load` in one process or in many."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from diloco_node.integrations.hf_export import SavedModel
from diloco_node.numeric import F32


def save_dcp(folder: Path, tensors: Mapping[str, F32], *, dtype: str) -> SavedModel:
    """Write the tensors under their names, without a process group.

    folder: empty. tensors: merged ones, by `model.named_parameters()`. dtype: such as "bfloat16".
    """
    kind: torch.dtype = getattr(torch, dtype)
    values = {name: torch.from_numpy(value).to(kind) for name, value in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be
        save(values, checkpoint_id=folder)
    return SavedModel(is_plain=False)
