"""The endless stream of batches of one of a fixed number of learners: any batch at once, by its number.

The built-in trainer's (`learner.builtin.data`) follows the members of a run. The arms of a comparison must see the same
batches, from whatever step.
"""

from __future__ import annotations

import numpy as np

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin.data import Corpus, Windows, windows_at
from diloco_node.learner.builtin.permutation import U64, mix, permute

SHARD_BYTES = 16_384
SHARD_WINDOWS_MIN = 16
"""A shard of long windows is longer: less than one window is left over of each, which is to be a small part."""


def _key_of(*numbers: int) -> U64:
    """Shape (1,): a key drawn from these numbers."""
    return np.random.SeedSequence(numbers).generate_state(1, np.uint64).astype(np.uint64)


class RegionSampler:
    """See the module. Each epoch is a permutation of the windows of every so many-th shard of the text.

    Args:
        region, regions: whose part of the shards this is: 0 <= region < regions.
        batch, context: shape of a batch is (batch, context + 1).
        seed: the same for all learners, or their parts would overlap.

    Attributes:
        position: number of the next batch. samples: windows in an epoch.
    """

    def __init__(self, corpus: Corpus, *, region: int, regions: int, batch: int, context: int, seed: int) -> None:
        self._shard_bytes = max(SHARD_BYTES, SHARD_WINDOWS_MIN * context)
        self._shards = len(corpus.train) // self._shard_bytes
        # Shard number first + step * k in the order in which they are dealt.
        self._first, self._step = region, regions
        shard_count = len(range(self._first, self._shards, self._step))
        if not shard_count:
            raise ConfigError(f"no text for region {region} of {regions}: there are {self._shards} shards")
        self._text = corpus.train
        self._batch, self._context = batch, context
        self._windows = (self._shard_bytes - 1) // context
        self._slack = self._shard_bytes - 1 - self._windows * context
        self.samples = shard_count * self._windows
        self._key, self._deal_key = _key_of(seed, 1, region, 0), _key_of(seed, 0)
        self.position = 0

    def batch_at(self, position: int) -> Windows:
        """The batch of this position, shape (batch, context + 1); the position stays as it is."""
        numbers = position * self._batch + np.arange(self._batch, dtype=np.int64)
        epoch_keys = mix(self._key ^ mix((numbers // self.samples).astype(np.uint64)))
        sample = permute(numbers % self.samples, self.samples, epoch_keys)
        dealt = self._first + self._step * (sample // self._windows)
        shard = permute(dealt, self._shards, self._deal_key)
        shift = (mix(~epoch_keys) % np.uint64(self._slack + 1)).astype(np.int64)
        start = shard * self._shard_bytes + shift + sample % self._windows * self._context
        return windows_at(self._text, start, self._context)

    def next_batch(self) -> Windows:
        """The batch of the current position; then the position is one further."""
        batch = self.batch_at(self.position)
        self.position += 1
        return batch
