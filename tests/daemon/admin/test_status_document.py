"""Status, metrics and report: the same plain facts three times, cheap enough to be asked for every second."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from diloco_node.core.events import Note
from diloco_node.core.messages import LeftOut
from diloco_node.core.types import Ballot, FragmentPosition, LearnerStatus
from diloco_node.core.view import PeerView, RegionView, RoundView
from diloco_node.daemon.admin.metrics import StatusCollector
from diloco_node.daemon.admin.node_status import NodeStatus
from diloco_node.daemon.admin.status_document import (
    NOTES_SHOWN_MAX,
    REPORT_NAME,
    NoteBook,
    model_digest,
    region_status,
    write_report,
)
from diloco_node.daemon.learner.proxy import LearnerFacts
from diloco_node.errors import StorageError
from diloco_node.shared_memory import PlaceMark
from diloco_node.transport.kernel.wire_meter import PeerTraffic
from diloco_node.transport.link_status import LinkState, PeerStatus
from tests.kit.hostile import TEXTS

SECOND = 1_000_000_000


def view_of(fragments: int = 2, **changes: Any) -> RegionView:
    learner = LearnerStatus(1, 50, 5000, 100_000_000, (FragmentPosition(3, 40, 40, 4000),) * fragments)
    fields: dict[str, Any] = {
        "region": "us",
        "role": "leader",
        "term": 4,
        "leader": "us",
        "ledger_reason": "leads",
        "last_index": 12,
        "commit_index": 11,
        "applied_index": 10,
        "versions": (3,) * fragments,
        "digests": tuple((3, bytes([value % 256]) * 16) for value in range(fragments)),
        "learner": learner,
        "rounds": (RoundView(1, 4, Ballot(4, 2), 1, ("eu", "us"), ("us",), 2 * SECOND, "waits for eu"),),
        "peers": (PeerView("eu", True, 40_000_000, ("us",), learner, 9),),
        "participation": (("eu", 0.75), ("us", 1.0)),
        "end_waits": "",
        "waiting": "not due",
        "fetching": ((1, 3, "eu"),),
        "rounds_committed": 6,
        "tokens_merged": 1234,
        "digest_differences": 0,
        "is_ending": False,
        "finished": "",
        "is_final": False,
        "left_out": (LeftOut("eu", "member", "its contribution did not come"),),
    }
    return RegionView(**fields | changes)


def learner_of(status: LearnerStatus | None, **facts: Any) -> Any:
    return SimpleNamespace(
        facts=LearnerFacts(**facts),
        status=status,
        shown_status=status,
        version_area=SimpleNamespace(offered_at_ns=[(1, 3, 7)]),
        steps_total=150,
        pause=None,
        place=PlaceMark(7, step=9, included_step=5, checkpoint_step=2),
        tokens_total=15_000,
    )


TRANSPORT: Any = SimpleNamespace(
    traffic=lambda: {"eu": PeerTraffic(1000, 2000, True)},
    peer_status=lambda: {"eu": PeerStatus(LinkState.UP, "eu:1", "", 3)},
    rejections=Counter({("eu", "corrupt"): 2}),
    quarantine_reason=lambda peer: "in quarantine for 600 s more" if peer == "eu" else "",
    budget_status=lambda: {
        "egress_bytes_per_s": 125_000,
        "ingress_bytes_per_s": None,
        "allowed_bytes": 1000,
        "used_bytes": 970,
        "share_used": 0.97,
        "peers": {
            "eu": {
                "egress_bytes_per_s": 60_000,
                "limited_by": "grant",
                "granted_bytes_per_s": None,
                "overhead": 1.05,
                "correction_bytes": 31,
                "lanes": {
                    "control": {"wanted_bytes": 5, "used_bytes": 5},
                    "rounds": {"wanted_bytes": 9, "used_bytes": 8},
                },
            }
        },
    },
)


def status_of(view: RegionView, learner: Any = None, notes: NoteBook | None = None) -> dict[str, Any]:
    runtime = SimpleNamespace(
        notes=notes or NoteBook("us", lambda: 0), now_ns=lambda: 5 * SECOND, spec=SimpleNamespace(run_id="run1")
    )
    facts = SimpleNamespace(rounds=SimpleNamespace(rows=list))
    learner = learner or learner_of(view.learner)
    node: Any = SimpleNamespace(learner=learner, transport=TRANSPORT, runtime=runtime, facts=facts)
    return region_status(node, view, "training", {"events": 99, "buffered_bytes": 17, "tasks": 23})


def test_the_document_is_plain_json_with_times_in_seconds() -> None:
    document = json.loads(json.dumps(status_of(view_of())))
    assert document["rounds"] == [
        {
            "fragment": 1,
            "version": 4,
            "ballot": "4.2",
            "attempt": 1,
            "members": ["eu", "us"],
            "reducers": ["us"],
            "open_seconds": 3.0,
            "reason": "waits for eu",
        }
    ]
    (peer,) = document["peers"]
    assert (peer["rtt_seconds"], peer["link"], peer["wire_bytes_out"], peer["wire_bytes_in"]) == (
        0.04,
        "up",
        1000,
        2000,
    )
    assert (document["wire_bytes_out"], document["wire_bytes_in"]) == (1000, 2000)
    assert document["participation"] == 1.0
    assert document["participation_of"] == {"eu": 0.75, "us": 1.0}
    assert document["rejections"] == [{"peer": "eu", "reason": "corrupt", "count": 2}]
    assert document["left_out"] == [{"region": "eu", "part": "member", "reason": "its contribution did not come"}]
    assert document["quarantine"] == {"eu": "in quarantine for 600 s more"}
    assert document["fetching"] == [{"fragment": 1, "version": 3, "peer": "eu"}]
    assert document["offers"] == [[1, 3, 7]]
    assert (document["events"], document["buffered_bytes"], document["tasks"]) == (99, 17, 23)
    assert document["inner_steps"] == 150


def test_what_only_the_leader_or_nobody_knows_is_null() -> None:
    view = view_of()
    peer = replace(view.peers[0], rtt_ns=0, learner=None)
    far = replace(view.rounds[0], opened_at_ns=0)
    document = status_of(replace(view, peers=(peer,), rounds=(far,)))
    assert (document["peers"][0]["rtt_seconds"], document["peers"][0]["versions"]) == (None, None)
    assert document["rounds"][0]["open_seconds"] is None
    assert status_of(view)["peers"][0]["versions"] == [3, 3]


def test_an_alarm_that_is_told_is_handed_on_once() -> None:
    alarms: list[str] = []
    notes = NoteBook("us", lambda: 0, alarms.append)
    for _ in range(3):
        notes.add(Note("digest", "parameters differ \x1b[2J", is_alarm=True))
    notes.add(Note("open", "all is well"))
    assert alarms == ["parameters differ \\x1b[2J"]


def test_the_rate_is_of_now_and_the_age_of_the_last_report_is_shown() -> None:
    view = view_of()
    learner = learner_of(view.learner, first_report_ns=1 * SECOND, last_report_ns=3 * SECOND)
    for at in range(5):
        learner.facts.tokens.add(1000 * at, now_ns=SECOND + at * SECOND // 2)
    document = status_of(view, learner)["learner"]
    assert document["report_age_seconds"] == 2.0
    assert document["at_stake"] == {"unsaved_steps": 7, "unmerged_steps": 4}
    assert document["current_tokens_per_second"] == pytest.approx(4000 / 3.0), "a second late after two usual pauses"


def test_a_digest_is_shown_when_every_fragment_has_been_hashed_at_its_version() -> None:
    view = view_of()
    assert status_of(view)["digest"] == model_digest([digest for _, digest in view.digests])
    behind = view_of(digests=((2, b"a" * 16), (3, b"b" * 16)))
    assert status_of(behind)["digest"] is None
    other_order = view_of(digests=tuple(reversed(view.digests)))
    assert status_of(other_order)["digest"] != status_of(view)["digest"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "fragment 1 to 4: waits for eu"),
        ({"rounds": ()}, "not due"),
        ({"end_waits": "eu's script wants the end"}, "eu's script wants the end; fragment 1 to 4: waits for eu"),
        ({"finished": "steps_max"}, "finished: steps_max; the final model is not on disk yet"),
        ({"finished": "steps_max", "is_final": True}, "finished: steps_max"),
    ],
)
def test_the_reason_is_the_nearest_one(changes: dict[str, Any], line: str) -> None:
    assert status_of(view_of(**changes))["reason"] == line


def test_a_region_has_finished_once_its_model_is_on_disk() -> None:
    status = NodeStatus(Mock())
    ended = view_of(finished="steps_max", is_ending=True)
    assert (status._state(ended), status_of(ended)["end"]) == (
        "finishing",
        {"reason": "steps_max", "is_written": False},
    )
    written = replace(ended, is_final=True)
    assert (status._state(written), status_of(written)["end"]) == (
        "finished",
        {"reason": "steps_max", "is_written": True},
    )
    assert status_of(view_of())["end"] is None


def test_tokens_per_second_are_of_the_time_that_was_measured() -> None:
    view = view_of()
    facts = {"first_report_ns": 1 * SECOND, "last_report_ns": 3 * SECOND, "tokens_at_first_report": 1000}
    learner = status_of(view, learner_of(view.learner, **facts))["learner"]
    assert learner["tokens_per_second"] == 2000.0
    assert learner["report_age_seconds"] == 2.0
    assert learner["step_seconds"] == 0.1
    once = status_of(view, learner_of(view.learner, first_report_ns=SECOND, last_report_ns=SECOND))["learner"]
    assert once["tokens_per_second"] is None
    assert once["pause_age_seconds"] is None
    paused = status_of(view, learner_of(view.learner, resumed_ns=4 * SECOND))["learner"]
    assert paused["pause_age_seconds"] == 1.0
    never = status_of(view, learner_of(view.learner, ready_ns=SECOND))["learner"]
    assert (never["report_age_seconds"], never["first_step_wait_seconds"]) == (None, 4.0)
    assert once["first_step_wait_seconds"] is None


def test_without_a_learner_there_is_none() -> None:
    document = status_of(view_of(learner=None), learner_of(None, loss_last=2.0))
    assert document["learner"] is None
    assert document["loss_last"] == 2.0


def test_notes_are_the_newest_and_alarms_are_counted() -> None:
    notes = NoteBook("us", lambda: 0)
    for number in range(3 * NOTES_SHOWN_MAX):
        notes.add(Note("kind", f"text-{number}", is_alarm=number % 10 == 0))
    document = status_of(view_of(), notes=notes)
    assert len(document["notes"]) == NOTES_SHOWN_MAX
    assert document["notes"][-1]["text"] == f"text-{3 * NOTES_SHOWN_MAX - 1}"
    assert document["alarms"] == 20


def test_a_flood_of_one_cause_is_one_line_and_one_note_with_a_count() -> None:
    now_ns = [0]
    notes = NoteBook("us", lambda: now_ns[0])
    with capture_logs() as lines:
        for size in range(50_000):
            notes.add(Note("refused", f"State of {size} bytes from eu"))
            notes.add(Note("report", f"eu reports {size} fragments", is_alarm=True))
        assert [line["event"] for line in lines] == ["refused", "report"]
        assert [(note["kind"], note["count"]) for note in notes.last] == [("refused", 50_000), ("report", 50_000)]
        assert notes.alarms == 50_000, "each counts, told or not"
        now_ns[0] = 10**10
        notes.add(Note("refused", "State of 7 bytes from eu"))
    assert [(line["kind"], line["count"]) for line in lines if line["event"] == "held back"] == [
        ("refused", 49_999),
        ("report", 49_999),
    ]
    assert lines[-1]["event"] == "refused"


def test_a_flood_of_different_words_is_bounded_and_leaves_the_other_kinds_there() -> None:
    notes = NoteBook("us", lambda: 0)
    notes.add(Note("digest", "parameters differ", 3, 4, is_alarm=True))
    with capture_logs() as lines:
        for number in range(20_000):
            notes.add(Note("declined", f"eu: x{number}", 1, 2))
    assert len(lines) <= 200
    assert len(notes.last) == NOTES_SHOWN_MAX
    assert notes.last[0]["kind"] == "digest", "the alarm is still there to be seen"


def test_the_memory_of_notes_does_not_grow_with_the_run() -> None:
    """Each round has notes of its own, and in a sound run nothing is held back."""
    now_ns = [0]
    notes = NoteBook("us", lambda: now_ns[0])
    with capture_logs():
        for version in range(1000):
            now_ns[0] += SECOND
            notes.add(Note("committed", f"ballot 3.{version}", 1, version))
    assert len(notes._recent) <= NOTES_SHOWN_MAX


def test_each_step_of_a_round_is_told() -> None:
    notes = NoteBook("us", lambda: 0)
    with capture_logs() as lines:
        for version in range(20):
            notes.add(Note("open", f"ballot 3.{version}: due", 1, version))
            notes.add(Note("ballot", f"ballot 3.{version + 100}: the deadline passed", 1, version))
            notes.add(Note("ballot", f"ballot 3.{version + 200}: the deadline passed", 1, version))
            notes.add(Note("committed", f"ballot 3.{version + 200} with us, eu", 1, version))
    assert len(lines) == 80


def test_what_a_peer_wrote_is_escaped_in_status_log_and_metrics() -> None:
    notes = NoteBook("us", lambda: 0)
    with capture_logs() as lines:
        notes.add(Note("declined", "eu: \x1b[2J\nlevel=error \u202e"))
    assert lines[0]["reason"] == "eu: \\x1b[2J\\nlevel=error \\u202e"
    view = replace(view_of(), finished="\x1b]0;title\x07", is_final=True, waiting="\x9b")
    document = status_of(view, notes=notes)
    assert document["reason"] == "finished: \\x1b]0;title\\x07"
    assert all(text.isprintable() for text in texts(document))
    registry = CollectorRegistry()
    document["rejections"] = [{"peer": "eu", "reason": document["notes"][0]["text"], "count": 1}]
    registry.register(StatusCollector(lambda: document))
    assert b"\x1b" not in generate_latest(registry)


def test_hostile_texts_are_printable_in_status_log_and_metrics() -> None:
    notes = NoteBook("us", lambda: 0)
    with capture_logs() as lines:
        for text in TEXTS:
            notes.add(Note("declined", f"eu: {text}"))
    assert all(line["reason"].isprintable() for line in lines)
    assert len(lines) > 30, "each is another one"
    document = status_of(replace(view_of(), finished=TEXTS[-1], waiting="\n".join(TEXTS)), notes=notes)
    assert all(text.isprintable() for text in texts(document))
    document["rejections"] = [{"peer": "eu", "reason": text, "count": 1} for text in TEXTS]
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: document))
    lines_shown = generate_latest(registry).decode().split("\n")
    assert all(line.startswith(("#", "diloco_")) for line in lines_shown if line), "no line of a peer's own"
    assert sum(line.startswith("diloco_rejections_total{") for line in lines_shown) == len(set(TEXTS))


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from texts(key)
            yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)


def test_a_report_is_whole_or_the_old_one(tmp_path: Path) -> None:
    write_report(tmp_path, {"a": 1})
    write_report(tmp_path, {"a": 2})
    assert json.loads((tmp_path / REPORT_NAME).read_text()) == {"a": 2}
    with pytest.raises(TypeError):
        write_report(tmp_path, {"a": object()})
    assert json.loads((tmp_path / REPORT_NAME).read_text()) == {"a": 2}
    assert [path.name for path in tmp_path.iterdir()] == [REPORT_NAME]
    with pytest.raises(StorageError, match=r"report\.json"):
        write_report(tmp_path / "gone", {"a": 1})


def test_a_status_costs_no_more_for_each_fragment_when_there_are_many() -> None:
    """It is asked for every second, on the loop. Processor time, the least of some, beside fewer in the same run."""
    notes = NoteBook("us", lambda: 0)
    for _ in range(NOTES_SHOWN_MAX):
        notes.add(Note("kind", "text"))

    def least_s(fragments: int) -> float:
        view = view_of(fragments=fragments)
        learner = learner_of(view.learner)
        times_s = []
        for _ in range(7):
            started_s = time.process_time()
            status_of(view, learner, notes)
            times_s.append(time.process_time() - started_s)
        return min(times_s)

    ratios = []
    for _ in range(5):
        ratios.append(least_s(3000) / least_s(300))
        if ratios[-1] < 30:  # ten times as many; of squares it would be a hundred
            return
    raise AssertionError(f"ten times the fragments cost {ratios} times as much")


def test_the_digest_of_a_model_depends_on_the_order_of_its_fragments() -> None:
    assert model_digest([b"a", b"b"]) != model_digest([b"b", b"a"])
