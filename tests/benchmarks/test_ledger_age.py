"""The benchmark of old ledgers: what it makes is a ledger, and a restart behind sums has applied all of it."""

from pathlib import Path

from benchmarks.ledger_age import make, restart


def test_a_ledger_that_is_summed_up_stays_short_and_starts_with_all_its_rounds(tmp_path: Path) -> None:
    make(tmp_path / "short", 480, summary_entries=64)
    make(tmp_path / "whole", 480, summary_entries=1 << 62)
    short, whole = restart(tmp_path / "short", 64), restart(tmp_path / "whole", 1 << 62)
    assert short["entries"] > 480
    assert whole["entries_kept"] >= whole["entries"] > 480, "its own first entry as leader counts, too"
    assert short["entries_kept"] < 400
    assert short["ledger_bytes"] < whole["ledger_bytes"]
