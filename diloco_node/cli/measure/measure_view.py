"""What `measure` prints for people: the documents of `measure.documents` as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from diloco_node.cli.tables import plain_table, table_console
from diloco_node.measure.documents import FlowCase

LOSS_NOTE: Final = (
    "Probes travel over TCP, which hides loss: `retrans.` is the part of the bytes that the kernels of both ends "
    "retransmitted, `unanswered` are probes without an answer in 2 s."
)

SHORT: Final = 0.9
"""A test that counted less of its time than this is told."""


def show(document: Mapping[str, Any]) -> None:
    """Print a document: rows of latency, tests of bandwidth, or pairs of a mesh."""
    console = table_console()
    lines: list[str] = []
    if "rows" in document:
        console.print(latency_table(document), LOSS_NOTE, sep="\n\n")
    elif "tests" in document:
        console.print(bandwidth_title(document), soft_wrap=True)
        console.print(bandwidth_table(document))
        lines += [*short_lines(document), *failure_lines(document)]
    else:
        console.print(mesh_table(document))
    if document.get("ended_early"):
        lines.append("ended early: this is what was measured until then")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def latency_table(document: Mapping[str, Any]) -> Any:
    """Rows of `measure latency`."""
    table = _table("load", "probes", "unanswered", "min", "p50", "p99", "max", "jitter", "retrans.", "TCP min")
    for row in document["rows"]:
        least = row["tcp_rtt_min_seconds"]
        table.add_row(
            row["load"],
            str(row["answered"] + row["unanswered"]),
            str(row["unanswered"]),
            *(_ms(row[f"{name}_seconds"]) for name in ("min", "p50", "p99", "max", "jitter")),
            _share(row["retransmitted_share"]),
            "?" if least is None else _ms(least),
        )
    return table


def bandwidth_table(document: Mapping[str, Any]) -> Any:
    """Rows of `measure bandwidth`."""
    table = _table("what", "conn.", "Mbit/s", "median", "p10", "p90", "CPU out", "in", "retrans.")
    for row in document["tests"]:
        case = _case(row)
        cpu, sent_bytes, retransmitted_bytes = row["cpu_seconds_per_gb"], row["sent_bytes"], row["retransmitted_bytes"]
        table.add_row(
            case.title,
            str(case.connections),
            _mbit(row["bytes_per_second"]),
            _mbit(row["bytes_per_second_median"]),
            _mbit(row["bytes_per_second_p10"]),
            _mbit(row["bytes_per_second_p90"]),
            f"{cpu['sender']:.2f}",
            f"{cpu['receiver']:.2f}",
            _share(retransmitted_bytes / sent_bytes if sent_bytes else None),
        )
    return table


def short_lines(document: Mapping[str, Any]) -> list[str]:
    """Tests whose bytes were used up long before their time, so that less than that was counted: one line for all."""
    seconds = document["seconds"]
    short = [
        f"{_case(row).title} ({row['connections']}) {row['counted_seconds']:.2g} s"
        for row in document["tests"]
        if row["counted_seconds"] < SHORT * seconds
    ]
    return (
        [f"the bytes of a test (--most) were used up early, and less was counted: {'; '.join(short)}"] if short else []
    )


def failure_lines(document: Mapping[str, Any]) -> list[str]:
    """What could not be measured and why: one line for tests that failed for the same reason."""
    cases: dict[str, list[str]] = {}
    for row in document.get("failures", ()):
        case = _case(row)
        over = f" ({case.connections})" if case.connections else ""
        cases.setdefault(row["error"], []).append(f"{case.title}{over}")
    return [f"not measured: {'; '.join(titles)}: {error}" for error, titles in cases.items()]


def _case(row: Mapping[str, Any]) -> FlowCase:
    return FlowCase(row["from"], row["to"], row["body"], row["connections"])


def bandwidth_title(document: Mapping[str, Any]) -> str:
    """What was measured, in a line above the table."""
    control = document["congestion_control"]
    return (
        f"{document['from']} -> {document['to']}, round trip {_ms(document['rtt_seconds'])}, "
        f"{document['seconds']:g} s each after {document['warm_up_seconds']:.1f} s, "
        f"TCP: {control['here'] or '?'} here, {control['there'] or '?'} there. "
        f"CPU: seconds per GB.{_lane_note(document)}"
    )


def _lane_note(document: Mapping[str, Any]) -> str:
    """What is special about a measurement by a daemon; nothing for one between measuring ends."""
    if document.get("through") != "daemon":
        return ""
    limit = document["limit_bytes_per_second"]
    limit_note = f"; limited to {_mbit(limit)} Mbit/s ({document['limited_by']})" if limit else ""
    return f"\nthrough the running daemon, over the run's link, in its measurement lane{limit_note}: what rounds leave"


def mesh_table(document: Mapping[str, Any]) -> Any:
    """A row per ordered pair."""
    table = _table("from", "to", "RTT p50", "p99", "jitter", "Mbit/s", "p10", "p90", "retrans.")
    for row in document["pairs"]:
        table.add_row(
            row["from"],
            row["to"],
            _ms(row["rtt_seconds"]),
            _ms(row["rtt_p99_seconds"]),
            _ms(row["jitter_seconds"]),
            _mbit(row["bytes_per_second"]),
            _mbit(row["bytes_per_second_p10"]),
            _mbit(row["bytes_per_second_p90"]),
            _share(row["retransmitted_share"]),
        )
    return table


def _table(*columns: str) -> Any:
    text = {"load", "what", "way", "from", "to"}
    return plain_table(*((name, "left" if name in text else "right") for name in columns), is_wrapping=False)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds < 0.1 else f"{1e3 * seconds:.1f} ms"


def _mbit(bytes_per_s: float) -> str:
    mbit = 8 * bytes_per_s / 1e6
    return f"{mbit:.2f}" if mbit < 10 else f"{mbit:.1f}" if mbit < 100 else f"{mbit:.0f}"


def _share(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.2f} %"
