"""Buckets are cumulative, and a bound belongs to its bucket: as Prometheus has it."""

from diloco_node.health.phase_times import BOUNDS_S, PhaseTimes


def test_buckets_are_cumulative() -> None:
    times = PhaseTimes()
    for seconds in (0.005, 0.3, 0.31, 1000.0):
        times.add({"gather": seconds})
    times.add({"reduce": 1.0})
    document = times.document()
    buckets = dict(document["gather"]["buckets"])
    assert [buckets[bound] for bound in ("0.01", "0.1", "0.3", "1.0", "300.0", "+Inf")] == [1, 1, 2, 3, 3, 4]
    assert document["gather"]["sum_seconds"] == 1000.615
    assert len(buckets) == len(BOUNDS_S) + 1
    assert dict(document["reduce"]["buckets"])["1.0"] == 1
