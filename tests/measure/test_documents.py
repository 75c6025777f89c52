"""measure/measurement.py: the numbers of a document, each from those that a person can check."""

from dataclasses import replace

import pytest

from diloco_node.measure.measurement import flow_document, latency_document, pair_document
from diloco_node.measure.requester import FlowMeasured
from diloco_node.measure.samples import summarise_rtts
from diloco_node.wire.measure_messages import LinkMeasured, MeasurementReceived, MeasurementSent


def test_a_flow_is_reported_in_bytes_and_processor_seconds_per_gigabyte() -> None:
    # 0.5 s of 2 at 250 MB/s are 1 s per GB; 3 of 2 s are 6.
    measured = FlowMeasured(
        MeasurementReceived(7, 250_000_000, 240_000_000, 1, 2, 4_000_000_000, 500_000_000, 2_000_000_000),
        MeasurementSent(7, 3_000_000_000, 2_000_000_000, 700_000_000, 600_000_000, 6_000_000),
        10**9,
    )
    found = flow_document(measured, 4)
    assert found == {
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
    unknown = flow_document(replace(measured, sent=replace(measured.sent, sent_bytes=-1)), 4)
    assert unknown == {**found, "sent_bytes": None, "retransmitted_bytes": None}


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
