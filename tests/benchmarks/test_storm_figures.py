"""What the logs of the storm over other systems add up to."""

import json
from pathlib import Path

import pytest
from storm_figures import Event, Kill, commits_kept, events_of, return_s, steps_kept


def commit(at: float, step: int, *, rank: int = 0, quorum: int = 1, tokens: float = 100.0) -> Event:
    return {"kind": "commit", "at": at, "rank": rank, "step": step, "quorum": quorum, "tokens": tokens}


def step(at: float, number: int, *, rank: int = 0) -> Event:
    return {"kind": "step", "at": at, "rank": rank, "step": number}


def saved(at: float, number: int) -> Event:
    return {"kind": "saved", "at": at, "rank": 0, "step": number}


def test_commits_of_all_groups_count_within_the_window_only() -> None:
    events = [commit(0.9, 1), commit(1.1, 2), commit(1.1, 2, rank=1, tokens=40.0), commit(2.0, 3), commit(2.1, 4)]
    assert commits_kept(events, 1.0, 2.0) == (240.0, [1.1, 1.1, 2.0])


def test_a_commit_that_all_groups_forgot_is_lost() -> None:
    events = [commit(1.0, 1), commit(2.0, 2), commit(3.0, 3), commit(5.0, 2, quorum=2), commit(6.0, 3, quorum=2)]
    assert commits_kept(events, 0.0, 9.0) == (300.0, [1.0, 5.0, 6.0])


def test_a_run_that_began_anew_has_lost_what_came_before_the_window_too() -> None:
    events = [commit(0.5, 1), commit(1.5, 2), commit(3.0, 1, quorum=2, tokens=7.0)]
    assert commits_kept(events, 1.0, 9.0)[0] == pytest.approx(7.0 - 100.0)


def test_a_group_that_heals_brings_nothing_and_loses_nothing() -> None:
    events = [commit(1.0, 1), commit(2.0, 2), commit(2.1, 2, rank=1, tokens=0.0), commit(3.0, 3, rank=1)]
    assert commits_kept(events, 0.0, 9.0)[0] == 300.0
    assert return_s(events, [Kill(0.5, 1)], 9.0) == [2.5], "healing is not yet work"


def test_steps_that_were_made_again_count_once() -> None:
    events = [saved(0.0, 10), *(step(at, 10 + at) for at in range(1, 6)), step(9.0, 11), step(10.0, 12)]
    kills = [Kill(5.5, 2)]
    assert steps_kept(events, kills, 1.0, 10.5) == (1.0, [2, 3, 4, 5]), "from 11 to 12; 13 to 15 were lost"
    assert return_s([step(4.0, 3, rank=2), step(9.0, 3, rank=2)], kills, 10.5) == [3.5]


def test_at_the_end_of_a_window_the_checkpoint_counts_while_nobody_is_back() -> None:
    events = [step(1.0, 11), saved(1.5, 12), step(1.6, 12), step(2.0, 13)]
    assert steps_kept(events, [Kill(2.5, 1)], 1.0, 3.0)[0] == 1.0, "12 was saved, 13 was not"
    assert steps_kept(events, [], 1.0, 3.0)[0] == 2.0
    assert steps_kept(events, [Kill(3.5, 1)], 1.0, 3.0)[0] == 2.0, "killed after the window"


def test_the_logs_of_all_ranks_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    for rank, times in ((0, (1.0, 4.0)), (1, (2.0, 3.0))):
        lines = [json.dumps({"kind": "trains", "at": at}) for at in times]
        (tmp_path / f"{rank}.jsonl").write_text("\n".join(lines) + "\n")
    assert [(one["at"], one["rank"]) for one in events_of(tmp_path, 3)] == [(1.0, 0), (2.0, 1), (3.0, 1), (4.0, 0)]
