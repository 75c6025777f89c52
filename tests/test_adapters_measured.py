"""adapters/measured.py: the numbers of a document, each from those that a person can check."""

from __future__ import annotations

import pytest

from diloco_node.adapters.flows import CpuUse, Received, Sent
from diloco_node.adapters.probe import FlowMeasured, LatencyMeasured
from diloco_node.errors import LinkLost
from diloco_node.measure.documents import FlowCase, failure_document, flow_document, latency_document, pair_document
from diloco_node.measure.samples import Goodput, summarise_rtts
from diloco_node.wire.measurement import PairMeasured

CASE = FlowCase("eu", "us", "transport", "int4", 4)


def test_a_flow_is_told_in_bytes_and_processor_seconds_per_gigabyte() -> None:
    # 0.5 s of 2 at 250 MB/s are 1 s per GB; 3 of 2 s are 6.
    measured = FlowMeasured(
        Received(Goodput(250_000_000, 240_000_000, 1, 2), CpuUse(500_000_000, 2_000_000_000)),
        Sent(CpuUse(3_000_000_000, 2_000_000_000), 600_000_000, 6_000_000),
    )
    assert flow_document(CASE, measured) == {
        "from": "eu",
        "to": "us",
        "path": "transport",
        "body": "int4",
        "connections": 4,
        "bytes_per_second": 250_000_000,
        "bytes_per_second_median": 240_000_000,
        "bytes_per_second_p10": 1,
        "bytes_per_second_p90": 2,
        "cpu_seconds_per_gb": {"sender": 6.0, "receiver": 1.0},
        "sent_bytes": 600_000_000,
        "retransmitted_bytes": 6_000_000,
    }


def test_a_flow_that_failed_has_its_reason_in_the_place_of_numbers() -> None:
    assert failure_document(CASE, LinkLost("us is gone")) == {
        "from": "eu",
        "to": "us",
        "path": "transport",
        "body": "int4",
        "connections": 4,
        "error": "us is gone",
    }


@pytest.mark.parametrize(
    ("path", "body", "title"), [("transport", "int4", "TLS, int4+zstd"), ("plain", "random", "plain TCP")]
)
def test_a_case_has_a_title(path: str, body: str, title: str) -> None:
    assert FlowCase("eu", "us", path, body, 1).title == title


def test_round_trips_are_told_in_seconds() -> None:
    measured = LatencyMeasured(summarise_rtts([40_000_000, 44_000_000, 42_000_000], unanswered=2), 0.25, None)
    document = latency_document("out", measured)
    assert (document["load"], document["answered"], document["unanswered"]) == ("out", 3, 2)
    assert [document[f"{name}_seconds"] for name in ("min", "p50", "p99", "max")] == [0.04, 0.042, 0.044, 0.044]
    assert (document["retransmitted_share"], document["tcp_rtt_min_seconds"]) == (0.25, None)
    again = latency_document("none", LatencyMeasured(measured.latency, None, 39_000_000))
    assert (again["retransmitted_share"], again["tcp_rtt_min_seconds"]) == (None, 0.039)


@pytest.mark.parametrize(
    ("sent", "again", "share"), [(1000, 10, 0.01), (0, 0, None), (-1, -1, None)], ids=["known", "nothing", "unknown"]
)
def test_a_pair_is_what_plan_reads(sent: int, again: int, share: float | None) -> None:
    document = pair_document(("eu", "us"), PairMeasured(4, 5, 6, 38, 2, 100, 90, 110, 0, sent, again))
    assert (document["from"], document["to"], document["rtt_seconds"]) == ("eu", "us", 4e-9)
    assert (document["bytes_per_second"], document["probes"], document["unanswered"]) == (100, 40, 2)
    assert document["retransmitted_share"] == share
    assert document["plain_bytes_per_second"] is None, "not measured"
