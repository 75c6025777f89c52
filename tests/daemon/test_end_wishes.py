"""Wishes for the run's end outlive a daemon, and nothing else."""

from pathlib import Path

import pytest
import structlog

from diloco_node.core.messages import FinishRequested
from diloco_node.daemon import end_wishes as end_wishes_module
from diloco_node.daemon.end_wishes import EndWishes
from diloco_node.errors import StorageError
from diloco_node.state_names import WISHES_NAME

LIMITS = (100, 0)
REMEDY = "order the end again if it is still wanted"
VOTE = FinishRequested("flat", False)
ORDER = FinishRequested("\x01" * 1024, True)


def test_the_last_wishes_are_on_disk_and_no_others(tmp_path: Path) -> None:
    wishes = EndWishes(tmp_path, LIMITS)
    assert wishes.last == []
    for now in ([VOTE], [ORDER, VOTE], [ORDER]):
        wishes.save(now)
        assert EndWishes(tmp_path, LIMITS).last == now == wishes.last
    wishes.save([])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"order": 5, "vote": null, "limits": [100, 0]}',
        '{"order": "%s", "limits": [100, 0]}' % ("x" * 1025),
        '{"order": "x"}',
        "[" * 9999,
    ],
)
def test_a_file_of_somebody_else_is_no_wish(tmp_path: Path, text: str) -> None:
    (tmp_path / WISHES_NAME).write_text(text)
    assert EndWishes(tmp_path, LIMITS).last == []


def test_a_disk_that_refuses_costs_the_memory_of_it_alone(tmp_path: Path) -> None:
    wishes = EndWishes(tmp_path / "gone", LIMITS)
    wishes.save([ORDER])
    assert wishes.last == [ORDER]
    wishes.save([])
    assert wishes.last == []


def test_a_full_disk_does_not_keep_an_order_that_was_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("the disk is full")

    wishes = EndWishes(tmp_path, LIMITS)
    wishes.save([ORDER])
    monkeypatch.setattr(end_wishes_module, "replace_file", refuse)
    wishes.save([])
    assert EndWishes(tmp_path, LIMITS).last == []


def test_a_wish_for_the_end_before_an_extension_is_none_after_it(tmp_path: Path) -> None:
    """The region was away when the run ended, and when it was extended."""
    EndWishes(tmp_path, LIMITS).save([ORDER, VOTE])
    with structlog.testing.capture_logs() as logs:
        assert EndWishes(tmp_path, (200, 0)).last == []
    assert [(line["event"], line["vote"]) for line in logs] == [
        (f"wishes for the end are dropped: run.steps or run.tokens changed since; {REMEDY}", VOTE.reason)
    ]
    assert EndWishes(tmp_path, LIMITS).last == [ORDER, VOTE]


def test_a_wish_that_an_earlier_version_has_written_is_dropped_with_the_true_cause(tmp_path: Path) -> None:
    (tmp_path / WISHES_NAME).write_text('{"vote": "flat"}')
    with structlog.testing.capture_logs() as logs:
        assert EndWishes(tmp_path, LIMITS).last == []
    cause = "an earlier version did not note their limits"
    assert [line["event"] for line in logs] == [f"wishes for the end are dropped: {cause}; {REMEDY}"]
