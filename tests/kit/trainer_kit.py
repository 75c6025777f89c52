"""A small model and its rows for trainers under a fake daemon, and the run's end as they see it."""

from pathlib import Path

import torch
from torch import Tensor, nn

from diloco_node.shared_memory import PLACE_AREA, PLACE_BYTES, PlaceMark, request_area
from tests.kit.fake_daemon import FakeDaemon

ROWS, BATCH, LENGTH = 64, 2, 5
BAD_ROW = 7


class Language(nn.Module):
    """As models of transformers: takes ids by name, returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.embedding(input_ids) - 1).square().mean()}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Of which one may be spoiled."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.bad:
            raise ValueError(f"row {index} is spoiled")
        return {"input_ids": torch.full((LENGTH,), index % 8)}


class Watched(Rows):
    """Rows that note what the learner says it does while they are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.activities = folder, list[str]()

    def look(self) -> None:
        mark = PlaceMark.decode(request_area(self.folder / "memory.sock", PLACE_AREA, PLACE_BYTES)[:])
        assert mark is not None
        self.activities.append(mark.activity)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.look()
        return super().__getitem__(index)


def merged_weight(daemon: FakeDaemon) -> Tensor:
    """The embedding as the run has it."""
    assert daemon.manifest is not None
    values = torch.zeros(32)
    for fragment, theta in zip(daemon.manifest.fragments, daemon.theta, strict=True):
        for piece in fragment.pieces:
            values[piece.value_start : piece.value_stop] = torch.from_numpy(
                theta[piece.offset : piece.offset + piece.size]
            )
    return values.view(8, 4)


def end_with_versions(daemon: FakeDaemon) -> None:
    """The run ends with a last version of each fragment."""
    daemon.stop_learner("enough", (1, 1))
    for fragment in range(2):
        daemon.commit(fragment, daemon.theta[fragment] + 1, -1)
