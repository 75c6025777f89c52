"""lab/demo/keeping.py: who is started again, with the numbers of the unit in deploy/systemd."""

from pathlib import Path

import pytest

from diloco_node.lab.demo.keeping import FAILURES_MAX, FAILURES_WITHIN_NS, RESTART_NS, RestartPolicy
from diloco_node.numeric import NS_PER_S
from diloco_node.supervisor.supervisor_spec import FINAL_CODES
from tests.kit.repository import ROOT


def test_who_was_killed_is_started_again_however_often() -> None:
    policy = RestartPolicy()
    assert all(policy.final_reason(-9, has_finished=False, now_ns=now) is None for now in range(100))


@pytest.mark.parametrize("code", [0, -15])
def test_who_ends_in_order_without_having_finished_is_started_again(code: int) -> None:
    policy = RestartPolicy()
    assert all(policy.final_reason(code, has_finished=False, now_ns=now) is None for now in range(100))


def test_who_has_finished_and_ends_with_zero_is_done_and_who_is_killed_is_not() -> None:
    policy = RestartPolicy()
    assert policy.final_reason(-9, has_finished=True, now_ns=0) is None
    assert policy.final_reason(1, has_finished=True, now_ns=1) is None
    assert policy.final_reason(0, has_finished=True, now_ns=2) == ""
    assert policy.final_reason(8, has_finished=True, now_ns=2) == "", "a script may fail after the run"


@pytest.mark.parametrize("code", sorted(FINAL_CODES))
def test_what_another_start_would_repeat_is_final(code: int) -> None:
    why = RestartPolicy().final_reason(code, has_finished=False, now_ns=0)
    assert why is not None
    assert str(code) in why


def test_the_numbers_are_those_of_the_unit_that_is_shipped() -> None:
    unit = (Path(ROOT) / "deploy" / "systemd" / "diloco-node@.service").read_text()
    settings = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
    assert {int(code) for code in settings["RestartPreventExitStatus"].split()} == FINAL_CODES
    assert settings["Restart"] == "on-failure"
    assert settings["RestartSec"] == f"{1000 * RESTART_NS // NS_PER_S}ms"
    assert settings["StartLimitBurst"] == str(FAILURES_MAX)
    assert settings["StartLimitIntervalSec"] == str(FAILURES_WITHIN_NS // NS_PER_S)
    assert settings["KillMode"] == "mixed"


def test_who_fails_by_itself_again_and_again_is_given_up() -> None:
    policy = RestartPolicy()
    for number in range(FAILURES_MAX - 1):
        assert policy.final_reason(1, has_finished=False, now_ns=number) is None
        assert policy.final_reason(-9, has_finished=False, now_ns=number) is None  # no failure of its own
    assert "5 times within 10 s" in (policy.final_reason(3, has_finished=False, now_ns=FAILURES_WITHIN_NS - 1) or "")


def test_failures_far_apart_are_forgotten() -> None:
    policy = RestartPolicy()
    step_ns = FAILURES_WITHIN_NS // (FAILURES_MAX - 1) + NS_PER_S
    assert all(policy.final_reason(1, has_finished=False, now_ns=n * step_ns) is None for n in range(50))
