"""Compares the tokens that a loop tells with those in the batches that it was given.

Only a loader or a callback sees batches. Where token ids come in integers their number is known, and so is the plain
mistake: tokens of all ranks told by each rank, or bytes. A loop may train on less than it is given, never on more,
unless it goes over its batches several times. So this warns, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from torch import Tensor

from diloco_node.errors import LearnerError
from diloco_node.learner.forward_watch import counted_tensor

STEPS_MIN: Final = 8
"""A loop may take its first batches before it tells of a step."""

RATIO_MAX: Final = 1.5

ZERO_STEPS: Final = 64
"""Some steps may train on nothing but padding."""

STEP_TOKENS_MAX: Final = 1 << 40
"""Tokens of a rank in one step: thousands of times the largest batches. A run could not count many more."""


class TokenCount:
    """Token ids in the batches so far: 0 if these hold no integers of two dimensions. item_bytes: of an id."""

    def __init__(self) -> None:
        self.tokens = 0
        self.item_bytes = 0

    def add(self, batch: Any) -> None:
        """Count one more batch."""
        tensor = counted_tensor(batch)
        if isinstance(tensor, Tensor) and tensor.dim() > 1 and not tensor.is_floating_point():
            self.tokens += tensor.numel()
            self.item_bytes = tensor.element_size()


class TokenCheck:
    """A comparison of the tokens that a loop tells with the `token_count` of its data, or of its callback."""

    def __init__(self, sources: Iterable[object]) -> None:
        counts = [getattr(source, "token_count", None) for source in sources]
        self._counts = [count for count in counts if isinstance(count, TokenCount)]
        self._steps = self._tokens = 0

    def step(self, tokens: int, *, total: int, ranks: int, warn: Callable[[str], None]) -> None:
        """Take what the loop tells of a step; warn once if it is too much, or nothing. total: told by all ranks."""
        self._steps += 1
        self._tokens += tokens
        if self._steps == ZERO_STEPS and not total:
            warn(
                f"step(tokens=0) was told {ZERO_STEPS} times, and work without tokens has no weight in a merge: give "
                "the tokens of the batch, or its samples"
            )
        count = sum(count.tokens for count in self._counts)
        if self._steps < STEPS_MIN or not count or self._tokens <= RATIO_MAX * count:
            return
        ratio = self._tokens / count
        causes = {"each rank gives the tokens of all ranks": ranks, "it gives bytes": self._counts[0].item_bytes}
        likely = [cause for cause, times in causes.items() if times > 1 and abs(ratio / times - 1.0) < 0.2]
        text = (
            f"step(tokens=...) told of {self._tokens} tokens in {self._steps} steps, the batches had {count} "
            f"({ratio:.3g} times): {' or '.join(likely) or 'give those of this rank, and each once'}"
        )
        warn(text)
        self._counts.clear()


def whole_tokens(tokens: Any) -> int:
    """Return what a loop counts as the integer that every reader expects. Raises LearnerError: it is none."""
    try:
        value = tokens.item() if hasattr(tokens, "item") else tokens  # of a tensor, or of NumPy's
        count = int(value)
        is_whole = isinstance(value, int | float) and not isinstance(value, bool) and count == value
    except (TypeError, ValueError, RuntimeError, OverflowError):
        is_whole = False
    if not is_whole:
        raise LearnerError(f"step(tokens={tokens!r:.80}): give a whole number, for instance batch.numel()")
    if not 0 <= count <= STEP_TOKENS_MAX:
        raise LearnerError(f"step(tokens={count!r:.80}): a step trains from 0 to {STEP_TOKENS_MAX} tokens")
    return count
