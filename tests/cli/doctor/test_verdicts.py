"""Verdicts from planted facts: what can't be planted for real on every machine, and how findings are shown."""

import datetime as dt
import io
import re
import sys

import pytest

from diloco_node.cli.doctor import verdicts
from diloco_node.cli.doctor.topics import (
    CATEGORIES,
    FSYNC,
    SPACE,
    SYNCED,
    examination_document,
    examination_lines,
    has_failed,
)
from diloco_node.health.finding import Finding, Mark, read_alert
from tests.kit.repository import ROOT

BAD = (Mark.WARNING, Mark.FAILED)


def day(number: int) -> dt.datetime:
    return dt.datetime(2027, 1, number, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("finding", "mark", "text"),
    [
        (verdicts.congestion_control("cubic", "cubic"), Mark.WARNING, "long links go by cubic"),
        (verdicts.congestion_control("cubic", "bbr"), Mark.OK, "BBR"),
        (verdicts.tcp_buffers(6 << 20, 32 << 20), Mark.WARNING, "at most 62.9 MB/s a connection over 100 ms"),
        (verdicts.tcp_buffers(16 << 20, 16 << 20), Mark.OK, "16.8 MB"),
        (verdicts.tcp_buffers(None, 16 << 20), Mark.UNKNOWN, "does not say"),
        (verdicts.descriptors(4096, 4096), Mark.OK, "4096 open files"),
        (verdicts.descriptors(4095, 4096), Mark.WARNING, "4095 open files allowed, 4096 wanted"),
        (verdicts.disk_space("f", free=50, usage=49, need=100, error=""), Mark.FAILED, "needs 100 B and has 49 B"),
        (verdicts.disk_space("f", free=50, usage=50, need=100, error=""), Mark.OK, "50 B free"),
        (verdicts.disk_space("f", free=50, usage=0, need=None, error=""), Mark.UNKNOWN, "not known"),
        (verdicts.fsync_time([0.001] * 99 + [9.0], 0.2), Mark.OK, "fsync p99 1.0 ms of 100"),
        (
            verdicts.fsync_time([0.001] * 98 + [9.0] * 2, 0.2),
            Mark.WARNING,
            "p99 9000.0 ms of 100; the heartbeat is",
        ),
        (verdicts.fsync_time([], 0.2), Mark.UNKNOWN, "not measured"),
        (verdicts.locks(""), Mark.OK, "files can be locked"),
        (verdicts.locks("f can't be locked (No locks): use NFS's"), Mark.FAILED, "f can't be locked (No locks)"),
        (verdicts.sockets("f", "", is_direct=True), Mark.OK, "Unix sockets can be bound in f"),
        (
            verdicts.sockets("t", "", is_direct=False),
            Mark.OK,
            "bound in t, for the path of the state folder is too long",
        ),
        (verdicts.sockets("f", "Not supported", is_direct=True), Mark.FAILED, "can be bound: Not supported"),
        (
            verdicts.sockets("", "t is open to others", is_direct=False),
            Mark.FAILED,
            "t is open to others, for the",
        ),
        (verdicts.memory(99, 100, is_taken=False), Mark.FAILED, "99 B available"),
        (verdicts.memory(100, 100, is_taken=False), Mark.OK, "100 B available"),
        (verdicts.memory(None, 100, is_taken=False), Mark.UNKNOWN, "not known"),
        (verdicts.memory(99, 100, is_taken=True), Mark.OK, "99 B available beside the daemon"),
        (verdicts.clock_sync(False), Mark.WARNING, "nothing keeps this clock right"),
        (verdicts.clock_sync(True), Mark.OK, "kept right"),
        (verdicts.clock_sync(None), Mark.UNKNOWN, "does not say"),
        (verdicts.clock_of_peer("eu", 4.9), Mark.OK, "eu's clock is 4.9 s ahead of ours"),
        (verdicts.clock_of_peer("eu", -5.1), Mark.WARNING, "eu's clock is 5.1 s behind ours"),
        (verdicts.clock_of_peer("eu", 3601), Mark.FAILED, "3601.0 s ahead"),
        (verdicts.peer_version("eu", 6, 7), Mark.FAILED, "eu speaks protocol 6, we speak 7"),
        (
            verdicts.path_mtu("eu", 1500, is_through=False, sent_bytes=16000),
            Mark.FAILED,
            "1500 bytes do not reach eu: 16000",
        ),
        (verdicts.path_mtu("eu", 1420, is_through=True, sent_bytes=16000), Mark.OK, "a tunnel on the way"),
        (verdicts.daemon("eu", None), Mark.UNKNOWN, "no daemon of eu answers here"),
        (verdicts.key_mode("k", 0o100640), Mark.WARNING, "k can be read by others (mode 640)"),
        (verdicts.key_mode("k", 0o100400), Mark.OK, "for its owner only"),
        (verdicts.certificate("eu", ""), Mark.OK, "signed by the run's authority"),
        (verdicts.certificate("eu", "", is_taken=False), Mark.WARNING, "goes on with the certificate before"),
        (verdicts.certificate_expiry(day(31), day(1)), Mark.OK, "valid until 2027-01-31, 30 days more"),
        (verdicts.certificate_expiry(day(30), day(1)), Mark.WARNING, "29 days more"),
        (verdicts.port("[::]:7400", "taken", is_own=True), Mark.OK, "held by this region's daemon"),
    ],
)
def test_a_fact_gets_its_verdict_with_a_remedy_where_it_is_bad(finding: Finding, mark: Mark, text: str) -> None:
    assert finding.mark is mark
    assert text in finding.text
    assert bool(finding.hint) is (mark in BAD)


def test_a_link_that_is_up_is_good() -> None:
    finding = verdicts.peer_link({"name": "eu", "link": "up", "address": None})
    assert (finding.mark, finding.text) == (Mark.OK, "the link to eu is up")


def test_a_link_that_is_down_says_why() -> None:
    peer = {"name": "eu", "link": "waiting", "address": "10.0.0.1:7400", "error": "no route to host"}
    finding = verdicts.peer_link(peer)
    assert (finding.mark, finding.text) == (Mark.FAILED, "the link to eu (10.0.0.1:7400) is waiting: no route to host")
    assert "diloco-node doctor in eu" in finding.hint


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("nobody listens there (connection refused)", "start eu, which listens when"),
        ("the name can't be resolved", "correct the name in regions.eu.address"),
        ("the certificate at this address belongs to another region or run", "correct regions.eu.address: another"),
        ("the peer's certificate has expired", "diloco-node certs renew eu"),
        ("the peer's certificate is not valid yet: check clocks", "set the clocks here and in eu"),
        ("it does not trust our certificate, is stopping, or its clock", "give all regions certificates of one"),
        ("protocol_version: ours 8, theirs 9", "install the same version of diloco-node here and in eu"),
        ("hello: field 3 is no text", "install the same version of diloco-node here and in eu"),
        ("the first frame on a stream must be a hello", "correct regions.eu.address: something else"),
        ("connected, but no hello within 5 s", "look at eu: what listens at h:1 hangs"),
        ("no answer to connect or TLS handshake", "open h:1 for TCP from here, in eu's firewall"),
    ],
)
def test_each_reason_for_which_a_peer_is_not_reached_has_its_remedy(error: str, hint: str) -> None:
    findings = [verdicts.peer_refused("eu", "h:1", text) for text in (error, f"eu at h:1: {error}")]
    assert [finding.text for finding in findings] == [f"eu at h:1: {error}"] * 2, "it is named once"
    assert all(finding.hint.startswith(hint) for finding in findings)


def test_alerts_of_the_daemon_are_findings_with_their_command() -> None:
    alert = {"code": "A-X", "text": "it is so", "hint": "do that", "command": "diloco-node status"}
    severities = ("critical", "warning", "info")
    findings = [verdicts.alert(read_alert(alert | {"severity": severity})) for severity in severities]
    assert [finding.mark for finding in findings] == [Mark.FAILED, Mark.WARNING, Mark.OK]
    (check, *_) = examination_document(findings)["checks"]
    assert (check["text"], check["hint"]) == ("A-X it is so", "do that: diloco-node status")
    assert verdicts.alert(read_alert({})).hint


def test_a_setting_that_differs_is_named_with_both_values() -> None:
    assert verdicts.differences({"a": 1, "b": 2}, {"a": 1, "b": 3}) == "b was 2, is 3"
    assert verdicts.differences({"a": 1}, {"a": 1}) == ""
    many = {str(index): index for index in range(20)}
    assert verdicts.differences(many, {}).endswith("; 12 more")


def test_lines_stand_under_their_category_with_the_remedy_below() -> None:
    findings = [FSYNC.ok("fast"), SYNCED.warning("off", "set it"), SPACE.failed("full\x1b", "empty it")]
    assert has_failed(findings)
    assert not has_failed(findings[:2])
    assert list(examination_lines(findings)) == [
        "disk",
        "√ fsync: fast",
        "× disk-space: full\\x1b",
        "  -> empty it (docs/doctor.md#disk-space)",
        "",
        "clock",
        "‼ clock-sync: off",
        "  -> set it (docs/doctor.md#clock-sync)",
        "",
        "1 of 3 checks failed, 1 with a warning",
    ]


def test_signs_are_plain_where_the_output_can_not_show_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert "xx disk-space: full" in list(examination_lines([SPACE.failed("full", "empty it")]))


def test_each_check_has_a_section_of_its_page() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert sorted(CATEGORIES) == sorted(re.findall(r"^## (\S+)$", page, re.MULTILINE))
