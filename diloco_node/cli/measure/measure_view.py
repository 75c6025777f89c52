"""Output of `measure` for people: the documents of `measure.measurement` as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import typer

from diloco_node.cli.tables import output_width, table_lines, wrap_text

LOSS_NOTE: Final = (
    "Probes travel over TCP, which hides loss: `retrans.` is the part of the bytes that the kernels of both ends "
    "retransmitted, `unanswered` are probes without an answer in 2 s."
)

SHORT: Final = 0.9
"""A flow that counted less of its time than this is told."""


def show(document: Mapping[str, Any]) -> None:
    """Print a document: rows of latency, bandwidth, or pairs of a mesh."""
    if "rows" in document:
        lines = [*latency_table(document), "", *wrap_text(LOSS_NOTE, output_width())]
    elif "bytes_per_second" in document:
        lines = [bandwidth_title(document), *bandwidth_table(document)]
        if document["counted_seconds"] < SHORT * document["seconds"]:
            lines.append(f"its bytes (--most) were used up early: {document['counted_seconds']:.2g} s were counted")
    else:
        lines = mesh_table(document)
    if document.get("ended_early"):
        lines.append("ended early: this is what was measured until then")
    typer.echo("\n".join(lines))


def latency_table(document: Mapping[str, Any]) -> list[str]:
    """The rows of `measure latency`."""
    columns = ("load", "probes", "unanswered", "min", "p50", "p99", "max", "jitter", "retrans.", "TCP min")
    rows = []
    for row in document["rows"]:
        least = row["tcp_rtt_min_seconds"]
        rows.append(
            (
                row["load"],
                str(row["answered"] + row["unanswered"]),
                str(row["unanswered"]),
                *(_ms(row[f"{name}_seconds"]) for name in ("min", "p50", "p99", "max", "jitter")),
                _share(row["retransmitted_share"]),
                "?" if least is None else _ms(least),
            )
        )
    return _table(columns, rows)


def bandwidth_table(document: Mapping[str, Any]) -> list[str]:
    """The row of `measure bandwidth`."""
    cpu, sent_bytes = document["cpu_seconds_per_gb"], document["sent_bytes"]
    row = (
        str(document["connections"]),
        *(_mbit(document[f"bytes_per_second{suffix}"]) for suffix in ("", "_median", "_p10", "_p90")),
        f"{cpu['sender']:.2f}",
        f"{cpu['receiver']:.2f}",
        _share(document["retransmitted_bytes"] / sent_bytes if sent_bytes else None),
    )
    return _table(("conn.", "Mbit/s", "median", "p10", "p90", "CPU out", "in", "retrans."), [row])


def bandwidth_title(document: Mapping[str, Any]) -> str:
    """Name what was measured, in a line above the table."""
    control, note = document["congestion_control"], ""
    if document.get("through") == "daemon":
        limit = document["limit_bytes_per_second"]
        limit_note = f"; limited to {_mbit(limit)} Mbit/s ({document['limited_by']})" if limit else ""
        note = "\nthrough the running daemon, over the run's link, in its measurement lane"
        note += f"{limit_note}: what rounds leave"
    return (
        f"{document['from']} -> {document['to']}, round trip {_ms(document['rtt_seconds'])}, "
        f"{document['seconds']:g} s after {document['warm_up_seconds']:.1f} s, "
        f"TCP: {control['here'] or '?'} here, {control['there'] or '?'} there. "
        f"CPU: seconds per GB.{note}"
    )


def mesh_table(document: Mapping[str, Any]) -> list[str]:
    """A row per ordered pair."""
    rows = [
        (
            row["from"],
            row["to"],
            *(_ms(row[f"{name}_seconds"]) for name in ("rtt", "rtt_p99", "jitter")),
            *(_mbit(row[f"bytes_per_second{suffix}"]) for suffix in ("", "_p10", "_p90")),
            _share(row["retransmitted_share"]),
        )
        for row in document["pairs"]
    ]
    return _table(("from", "to", "RTT p50", "p99", "jitter", "Mbit/s", "p10", "p90", "retrans."), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return table_lines([(name, "left" if name in ("load", "from", "to") else "right") for name in columns], rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds < 0.1 else f"{1e3 * seconds:.1f} ms"


def _mbit(bytes_per_s: float) -> str:
    mbit = 8 * bytes_per_s / 1e6
    return f"{mbit:.2f}" if mbit < 10 else f"{mbit:.1f}" if mbit < 100 else f"{mbit:.0f}"


def _share(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.2f} %"
