"""measure/documents.py: the numbers of a document, each from those that a person can check; series that fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_node.errors import DilocoError, LinkLost, PeersUnreachable
from diloco_node.measure.documents import (
    FlowCase,
    failure_document,
    flow_document,
    latency_document,
    pair_document,
    run_series,
)
from diloco_node.measure.requester import FlowMeasured
from diloco_node.measure.samples import summarise_rtts
from diloco_node.wire.measure_messages import LinkMeasured, MeasurementReceived, MeasurementSent

CASE = FlowCase("eu", "us", "int4", 4)


def test_a_flow_is_reported_in_bytes_and_processor_seconds_per_gigabyte() -> None:
    # 0.5 s of 2 at 250 MB/s are 1 s per GB; 3 of 2 s are 6.
    measured = FlowMeasured(
        MeasurementReceived(7, 250_000_000, 240_000_000, 1, 2, 4_000_000_000, 500_000_000, 2_000_000_000),
        MeasurementSent(7, 3_000_000_000, 2_000_000_000, 700_000_000, 600_000_000, 6_000_000),
        10**9,
    )
    found = flow_document(CASE, measured)
    assert found == {
        "from": "eu",
        "to": "us",
        "body": "int4",
        "connections": 4,
        "bytes_per_second": 250_000_000,
        "bytes_per_second_median": 240_000_000,
        "bytes_per_second_p10": 1,
        "bytes_per_second_p90": 2,
        "cpu_seconds_per_gb": {"sender": 6.0, "receiver": 1.0},
        "sent_bytes": 600_000_000,
        "retransmitted_bytes": 6_000_000,
        "counted_seconds": 4.0,
        "wire_bytes": 700_000_000,
        "wire_bytes_per_second": 350_000_000,
    }
    unknown = flow_document(CASE, replace(measured, sent=replace(measured.sent, sent_bytes=-1)))
    assert unknown == {**found, "sent_bytes": None, "retransmitted_bytes": None}


def test_a_flow_that_failed_has_its_reason_in_the_place_of_numbers() -> None:
    assert failure_document(CASE, LinkLost("us is gone")) == {
        "from": "eu",
        "to": "us",
        "body": "int4",
        "connections": 4,
        "error": "us is gone",
    }


@pytest.mark.parametrize(("body", "title"), [("int4", "TLS, int4+zstd"), ("random", "TLS, random")])
def test_a_case_has_a_title(body: str, title: str) -> None:
    assert FlowCase("eu", "us", body, 1).title == title


def test_round_trips_are_reported_in_seconds() -> None:
    measured = replace(summarise_rtts([40_000_000, 44_000_000, 42_000_000], lost_count=2), retransmitted=0.25)
    document = latency_document("out", measured)
    assert (document["load"], document["answered"], document["unanswered"]) == ("out", 3, 2)
    assert [document[f"{name}_seconds"] for name in ("min", "p50", "p99", "max")] == [0.04, 0.042, 0.044, 0.044]
    assert (document["retransmitted_share"], document["tcp_rtt_min_seconds"]) == (0.25, None)
    again = latency_document("none", replace(measured, retransmitted=None, tcp_rtt_min_ns=39_000_000))
    assert (again["retransmitted_share"], again["tcp_rtt_min_seconds"]) == (None, 0.039)


@pytest.mark.parametrize(
    ("sent", "again", "share"), [(1000, 10, 0.01), (0, 0, None), (-1, -1, None)], ids=["known", "nothing", "unknown"]
)
def test_a_pair_is_what_plan_reads(sent: int, again: int, share: float | None) -> None:
    document = pair_document(("eu", "us"), LinkMeasured(1, 4, 5, 6, 38, 2, 100, 90, 110, sent, again))
    assert (document["from"], document["to"], document["rtt_seconds"]) == ("eu", "us", 4e-9)
    assert (document["bytes_per_second"], document["probes"], document["unanswered"]) == (100, 40, 2)
    assert document["retransmitted_share"] == share


# ---- series ----------------------------------------------------------------------------------------------------------

CASES = [FlowCase("eu", "us", body, count) for count in (1, 4) for body in ("random", "int4")]


async def series(wrong: dict[int, DilocoError]) -> tuple[dict[str, Any], list[int]]:
    """What comes of CASES when some go wrong, and which were tried."""
    tried: list[int] = []

    async def test(case: FlowCase) -> dict[str, Any]:
        tried.append(CASES.index(case))
        if tried[-1] in wrong:
            raise wrong[tried[-1]]
        return {"case": case, "bytes_per_second": 125_000 * (tried[-1] + 1)}

    return await run_series(CASES, test, lambda _: None), tried


def measured(found: dict[str, Any]) -> list[int]:
    return [CASES.index(row["case"]) for row in found["tests"]]


async def test_all_of_it() -> None:
    found, tried = await series({})
    assert measured(found) == tried == [0, 1, 2, 3]
    assert found["failures"] == []


async def test_one_that_fails_leaves_the_others() -> None:
    found, tried = await series({2: LinkLost("us: the stream ended")})
    assert tried == [0, 1, 2, 3]
    assert measured(found) == [0, 1, 3]
    assert found["failures"] == [
        {
            "from": "eu",
            "to": "us",
            "body": "random",
            "connections": 4,
            "error": "us: the stream ended",
        }
    ]


async def test_nothing_is_tried_with_a_peer_that_can_not_be_reached_any_more() -> None:
    found, tried = await series({1: LinkLost("us: it ended"), 2: PeersUnreachable("us is gone")})
    assert tried == [0, 1, 2]
    assert measured(found) == [0]
    assert [(row["body"], row["connections"], row["error"]) for row in found["failures"]] == [
        ("int4", 1, "us: it ended"),
        ("random", 4, "us is gone"),
        ("int4", 4, "us is gone"),
    ]


async def test_a_first_one_that_fails_is_an_error() -> None:
    with pytest.raises(LinkLost, match="it ended"):
        await series({0: LinkLost("us: it ended")})


async def test_what_there_is_so_far_is_kept_after_each_test() -> None:
    kept: list[dict[str, Any]] = []

    async def test(case: FlowCase) -> dict[str, Any]:
        if case == CASES[1]:
            raise LinkLost("shut")
        return {"case": case, "bytes_per_second": 1}

    found = await run_series(CASES[:3], test, lambda _: None, kept.append)
    assert [(len(one["tests"]), len(one["failures"])) for one in kept] == [(1, 0), (1, 1), (2, 1)]
    assert kept[-1] == found


async def test_progress_says_what_is_on_and_what_the_last_one_was() -> None:
    progress: list[str] = []

    async def test(case: FlowCase) -> dict[str, Any]:
        return {"bytes_per_second": 125_000_000}

    await run_series([FlowCase("eu", "us", "int4", count) for count in (0, 4)], test, progress.append)
    assert progress == [
        "test 1 of 2: TLS, int4+zstd",
        "test 2 of 2: TLS, int4+zstd, connections: 4; the last one 1000 Mbit/s",
    ]
