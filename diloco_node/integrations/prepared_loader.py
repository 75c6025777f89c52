"""A data loader that Accelerate has prepared, with a position that a checkpoint keeps: epoch, and batches of it::

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    data = PreparedLoader(accelerator.prepare(DataLoader(own_part, batch_size=8, shuffle=True)))
    with diloco_node.attach(model, optimizer, stateful={"data": data}) as diloco:
        for batch in data:  # without end

Hugging Face's `Trainer` has such a loader too. A restart goes on in the same epoch: its sampler is given the seed that
it had, and batches that were trained are read and passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from accelerate.data_loader import IterableDatasetShard, SeedableRandomSampler, get_sampler
from torch.utils.data import DistributedSampler, IterableDataset, SequentialSampler

from diloco_node.errors import LearnerError
from diloco_node.learner.token_check import TokenCount

log = logging.getLogger("diloco_node.learner")

REPEATABLE: Final = (SequentialSampler, SeedableRandomSampler, DistributedSampler)
"""Samplers whose order follows from a seed and the epoch."""


class PreparedLoader:
    """Accelerate's loader, going round. The same object goes to `attach(stateful=...)` and into the loop.

    Args:
        loader: of `accelerator.prepare`.

    Attributes:
        epoch: how many are done, over all lives. batch: how many of the present one were given.
        token_count: of the batches that it gave, for `attach` to compare.

    Raises LearnerError: its position can't be kept; the message says why.
    """

    def __init__(self, loader: Any) -> None:
        if not hasattr(loader, "skip_batches"):
            raise LearnerError(
                f"the position in the data can't be kept: a {type(loader).__name__} was not prepared by Accelerate"
            )
        self._loader = loader
        inner = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
        self._sampler = get_sampler(loader) or getattr(inner, "sampler", None)
        if not isinstance(loader.dataset, IterableDataset) and not isinstance(self._sampler, REPEATABLE):
            raise LearnerError(
                f"the position in the data can't be kept: a {type(self._sampler).__name__} draws another order in each "
                "life. Use shuffle=True and DataLoaderConfiguration(use_seedable_sampler=True)"
            )
        self.epoch = 0
        self.batch = 0
        self.token_count = TokenCount()
        # Whether something else has placed the loader in this life: what a checkpoint says is not used.
        self._is_placed = False
        # How the sampler calls its seed, to which it adds the epoch of this life; empty for one without.
        self._seed_name = next((name for name in ("initial_seed", "seed") if hasattr(self._sampler, name)), "")
        self._seed = getattr(self._sampler, self._seed_name, 0)
        # Rows of a batch, over all ranks; 0: nobody knows.
        self._rows = getattr(loader, "total_batch_size", None) or 0

    def __iter__(self) -> Iterator[Any]:
        """Batches without end. Raises LearnerError: a whole epoch has none."""
        while True:
            before = self.batch
            for batch in self._loader:
                self.batch += 1
                self.token_count.add(batch)
                yield batch
            if not before and not self.batch:
                raise LearnerError("the data loader has no batch in a whole epoch: give this rank more data")
            self.next_epoch()

    def next_epoch(self) -> None:
        """An epoch is done."""
        self.epoch += 1
        self.batch = 0
        self._loader.skip_batches = 0

    def state_dict(self) -> dict[str, Any]:
        """Where it is. At the last batch of an epoch that is the beginning of the next one."""
        is_end = self.batch > 0 and self._loader.end_of_dataloader
        epoch, batch = (self.epoch + 1, 0) if is_end else (self.epoch, self.batch)
        return {"epoch": epoch, "batch": batch, "seed": self._seed, "rows": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before the first batch."""
        if self._is_placed:
            return
        self.epoch, self.batch, self._seed = state["epoch"], state["batch"], state["seed"]
        if self._rows and state.get("rows", 0) not in (0, self._rows):  # a batch of another size than before
            self.batch = self.batch * state["rows"] // self._rows
        self._loader.skip_batches = self.batch
        if self._seed_name:
            setattr(self._sampler, self._seed_name, self._seed + self.epoch)
        dataset = self._loader.dataset
        if isinstance(dataset, IterableDataset) and hasattr(dataset, "set_epoch"):
            dataset.set_epoch = partial(_set_later_epoch, dataset.set_epoch, self.epoch)
        if isinstance(dataset, IterableDatasetShard):  # it has a set_epoch, and its rows the order of what it shards
            dataset = dataset.dataset
        if isinstance(dataset, IterableDataset) and not hasattr(dataset, "set_epoch") and self.batch + self.epoch:
            log.warning(
                "a %s has no set_epoch(): nobody knows if its order is the same in each life. If it is drawn anew, the "
                "%d batches that are passed over are not those that were trained: draw it from a fixed seed",
                type(dataset).__name__,
                self.batch,
            )
        log.info("the data go on at batch %d of epoch %d", self.batch, self.epoch)

    def place(self, epoch: int, batch: int) -> None:
        """Say that the loader is there already, whatever a checkpoint says."""
        self.epoch, self.batch, self._is_placed = epoch, batch, True
        log.info("the data go on where the Trainer's own checkpoint was: at batch %d of epoch %d", batch, epoch)


def _set_later_epoch(set_epoch: Callable[[int], None], epochs: int, epoch: int) -> None:
    set_epoch(epochs + epoch)
