"""A script that counts tokens wrongly is told so where its batches are known."""

from typing import Any

import pytest
import torch

from diloco_node.health.alerts import TOKENS_TOLD
from diloco_node.integrations.loader import EndlessLoader
from diloco_node.learner.token_check import STEPS_MIN, ZERO_STEPS, TokenCheck

BATCH = {"input_ids": torch.zeros(4, 64, dtype=torch.int64), "weights": torch.zeros(4)}


def warnings_of(tokens_per_step: int, *, batch: Any = BATCH, ranks: int = 4, steps: int = 3 * STEPS_MIN) -> list[str]:
    """What is said in a loop that takes a batch for each step."""
    loader = EndlessLoader(lambda _: [batch] * 5)  # type: ignore[arg-type, return-value]
    check, texts = TokenCheck([{"other": 1}, loader]), []
    for _, _ in zip(range(steps), loader, strict=False):
        check.step(tokens_per_step, total=tokens_per_step, ranks=ranks, warn=texts.append)
    return texts


@pytest.mark.parametrize(
    ("tokens", "cause"),
    [
        (4 * 256, ": each rank gives the tokens of all ranks"),
        (8 * 256, ": it gives bytes"),
        (3 * 256, ": give those of this rank, and each once"),
    ],
)
def test_a_loop_that_counts_too_much_is_told_once_why(tokens: int, cause: str) -> None:
    (text,) = warnings_of(tokens)
    told, batches = STEPS_MIN * tokens, STEPS_MIN * 256
    assert text.startswith(f"{TOKENS_TOLD}{told} tokens in {STEPS_MIN} steps, the batches had {batches} ")
    assert text.endswith(cause)


@pytest.mark.parametrize("tokens", [0, 200, 256, 380])
def test_a_loop_may_train_on_less_than_it_is_given(tokens: int) -> None:
    assert warnings_of(tokens) == []


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(4, 3, 8, 8),
        (torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)),
        ["text"],
        torch.zeros(4).int(),
    ],
    ids=["pictures", "pictures with labels", "texts", "labels"],
)
def test_where_batches_hold_no_token_ids_nothing_is_said(batch: Any) -> None:
    assert warnings_of(10**9, batch=batch) == []


def test_a_loop_that_counts_nothing_is_told_once() -> None:
    texts: list[str] = []
    for total in (0, 7):  # another rank may count for all
        check = TokenCheck([object()])
        for _ in range(3 * ZERO_STEPS):
            check.step(0, total=total, ranks=2, warn=texts.append)
    (text,) = texts
    assert text.startswith(f"step(tokens=0) was told {ZERO_STEPS} times, and work without tokens has no weight")


def test_without_a_loader_nothing_is_known() -> None:
    texts: list[str] = []
    check = TokenCheck([object()])
    for _ in range(2 * STEPS_MIN):
        check.step(10**9, total=10**9, ranks=1, warn=texts.append)
    assert texts == []
