"""A data loader that goes round: each epoch with a loader of its own, and a position that a checkpoint keeps::

    loader = EndlessLoader(lambda epoch: StatefulDataLoader(own_part(epoch), batch_size=8))
    with diloco_node.attach(model, optimizer, stateful={"data": loader}) as diloco:
        for batch in loader:

A streamed dataset of Hugging Face that was given a state begins every later epoch there. With `set_epoch`, that of
datasets 5.2 then reads another rank's files. So none is used twice here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from diloco_node.errors import LearnerError
from diloco_node.learner.checkpoint import Stateful
from diloco_node.learner.data_positions import workers_before
from diloco_node.learner.token_check import TokenCount

log = logging.getLogger("diloco_node.learner")


class LoaderWithState(Stateful, Protocol):
    """torchdata's `StatefulDataLoader`, or what else has a position."""

    def __iter__(self) -> Iterator[Any]: ...


class EndlessLoader:
    """A loader that goes round. The same object goes to `attach(stateful=...)` and into the loop.

    Args:
        make: returns a fresh loader of this rank's part; is given the epoch, from 0.

    Attributes:
        epoch: how many epochs are done. token_count: of the batches that it gave, for `attach` to compare.
    """

    def __init__(self, make: Callable[[int], LoaderWithState]) -> None:
        self._make = make
        self.epoch = 0
        self.token_count = TokenCount()
        self._loader = make(0)

    def __iter__(self) -> Iterator[Any]:
        """Batches without end. Raises LearnerError: a whole epoch has none."""
        is_whole = False  # the first may have been restored at its end
        while True:
            count = 0
            for count, batch in enumerate(self._loader, start=1):  # noqa: B007 (read after the loop)
                self.token_count.add(batch)
                yield batch
            if is_whole and not count:
                raise LearnerError("the data loader has no batch in a whole epoch: give this rank more data")
            is_whole = True
            self.epoch += 1
            self._loader = self._make(self.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Epoch, and where its loader is."""
        return {"epoch": self.epoch, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before the first batch."""
        self.epoch = state["epoch"]
        self._loader = self._make(self.epoch)
        if (before := workers_before(self._loader, state["loader"])) is not None:
            log.warning(
                "the data were kept with num_workers=%d, here it is another number: epoch %d is begun anew, and its "
                "rows come once more. Give as many as before to go on within it",
                before,
                self.epoch,
            )
            return
        self._loader.load_state_dict(state["loader"])
