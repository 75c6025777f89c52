"""The run of a folder, and whether it is over."""

from pathlib import Path

import pytest

from diloco_node.core.ledger.summary import RunSummary, encode_summary
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.types import FinishedBody, GenesisBody, LedgerBase
from diloco_node.daemon.admin.status_document import write_report
from diloco_node.daemon.run_record import has_final_report, is_complete, read_run_record, run_record
from diloco_node.errors import ConfigError
from diloco_node.state_names import FINAL_NAME, LEDGER_NAME
from tests.kit.begun_kit import begin_run

REGIONS = ("a", "b", "c")


def test_a_folder_without_a_run_or_with_a_damaged_one_says_nothing(tmp_path: Path) -> None:
    assert read_run_record(tmp_path) is None
    begin_run(tmp_path, "old", REGIONS)
    (tmp_path / LEDGER_NAME).write_bytes(b"damaged")
    assert read_run_record(tmp_path) is None


def test_a_folder_of_another_run_or_of_other_regions_is_refused_with_both_names(tmp_path: Path) -> None:
    begin_run(tmp_path, "old", REGIONS)
    record = read_run_record(tmp_path)
    assert record is not None
    record.check(tmp_path, run_id="old", founders=("c", "b", "a"))
    with pytest.raises(ConfigError, match=r"holds run old, but run\.id is new: a new run begins in a new folder"):
        record.check(tmp_path, run_id="new", founders=REGIONS)
    with pytest.raises(ConfigError, match=r"began with the regions a, b, c, run\.toml has a, b: "):
        record.check(tmp_path, run_id="old", founders=("a", "b"))


def test_who_came_and_who_left_need_not_be_in_the_run_toml(tmp_path: Path) -> None:
    changes = (MembershipBody("d", "contributor", "d:1"), MembershipBody("a", "former"))
    begin_run(tmp_path, "old", REGIONS, changes=changes)
    record = read_run_record(tmp_path)
    assert record is not None
    assert record.roster.places("a") == ("a", "b", "c", "d")
    for founders in (REGIONS, ("b", "c"), ("b", "c", "d")):
        record.check(tmp_path, run_id="old", founders=founders)
    for founders in (("b",), (*REGIONS, "e")):
        with pytest.raises(ConfigError, match=r"`diloco-node members add` adds others while it runs"):
            record.check(tmp_path, run_id="old", founders=founders)


def test_a_run_is_complete_here_when_its_end_is_known_and_the_model_written(tmp_path: Path) -> None:
    begin_run(tmp_path / "going", "run", REGIONS)
    begin_run(tmp_path / "over", "run", REGIONS, finished="run.steps is reached")
    going, over = read_run_record(tmp_path / "going"), read_run_record(tmp_path / "over")
    assert going is not None
    assert over is not None
    assert (going.finished, over.finished) == (None, "run.steps is reached")
    assert is_complete(tmp_path / "over", over)
    (tmp_path / "going" / FINAL_NAME).write_bytes(b"of something else")
    assert not is_complete(tmp_path / "going", going)
    (tmp_path / "over" / FINAL_NAME).unlink()
    assert not is_complete(tmp_path / "over", over), "a daemon has to write it first"
    write_report(tmp_path / "over", {"state": "finished"})
    assert not is_complete(tmp_path / "over", over), "an older daemon said so before"
    write_report(tmp_path / "over", {"state": "finished", "end": {"is_written": True}})
    assert is_complete(tmp_path / "over", over), "it was there, and was moved away"
    assert not is_complete(tmp_path / "over", None)


def test_a_ledger_behind_a_sum_says_the_same(tmp_path: Path) -> None:
    genesis = GenesisBody("run", "m", "s", REGIONS, (bytes(32),) * 2, (b"1" * 16, b"2" * 16, b"3" * 16))
    zeros = (0, 0)
    end = (FinishedBody(zeros, "asked"),)
    summary = RunSummary((genesis,), end, zeros, zeros, (), zeros, zeros, (), (), (), (), (-1, -1), 0, (), (b"", b""))
    record = run_record(LedgerBase(9, 1, bytes(32), encode_summary(summary)), (), 2)
    assert record is not None
    assert (record.genesis, record.finished) == (genesis, "asked")


@pytest.mark.parametrize(
    ("content", "is_final"),
    [
        ('{"state": "training", "end": null}', False),
        ('{"state": "finishing", "end": {"reason": "asked", "is_written": false}}', False),
        ('{"end": 5}', False),
        ("{", False),
        ("[]", False),
        ("[" * 10**5, False),
    ],
    ids=range(6),
)
def test_only_the_report_of_a_finished_run_with_its_model_is_final(
    tmp_path: Path, content: str, is_final: bool
) -> None:
    assert not has_final_report(tmp_path)
    (tmp_path / "report.json").write_text(content)
    assert has_final_report(tmp_path) is is_final
    write_report(tmp_path, {"state": "finished", "end": {"is_written": True}})
    assert has_final_report(tmp_path)
