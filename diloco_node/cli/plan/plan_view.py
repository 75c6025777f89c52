"""A plan as tables that a person reads at 100 columns, and as one JSON object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from diloco_node.cli.plan.plan_command import ASSUMED
from diloco_node.cli.tables import output_width, table_lines, wrap_text
from diloco_node.health.reading import human_bytes
from diloco_node.numeric import NS_PER_S
from diloco_node.planning.advice import budget_min, find_changes, format_rate, mean_bits, sync_every_min, verdict
from diloco_node.planning.plan import Flow, FlowKind, Plan

ROWS_MAX: Final = 16


def document(plan: Plan, inputs: Mapping[str, str]) -> dict[str, Any]:
    """Everything, in bytes, seconds and bytes per second; None is "no limit" or "no rate is enough"."""
    work, settings, need = plan.workload, plan.workload.settings, plan.need
    return {
        "inputs": {
            "parameters": work.values,
            "regions": sorted(work.regions),
            "fragments": len(work.fragments),
            "fragment_values_max": max(fragment.values for fragment in work.fragments),
            "sync_every": settings.sync_every,
            "overlap_steps": settings.overlap_steps,
            "rounds_in_flight_max": settings.rounds_in_flight_max,
            "codec_up": str(settings.codec_up),
            "codec_down": str(settings.codec_down),
            "bits_per_value_mean": float(mean_bits(settings)),
            "step_seconds": work.step_time_ns / NS_PER_S,
            "rtt_seconds": plan.network.rtt_ns / NS_PER_S,
            "overhead": float(work.overhead),
            "origins": dict(inputs),
        },
        "round": _round_document(plan),
        "flows": [_flow_document(plan, flow) for flow in plan.flows],
        "storage": {
            "memory_bytes": plan.storage.memory,
            "disk_bytes": plan.storage.disk,
            **{f"{row.replace(' ', '_')}_bytes": size for row, size in _storage_parts(plan)},
        },
        "verdict": {
            "fits": plan.fits if plan.network.has_limits else None,
            "slack": float(plan.slack),
            "text": verdict(plan),
            "busiest": str(need.busiest) if need.busiest is not None else None,
            "sync_every_kept": float(plan.sync_every_kept),
            "sync_every_min": sync_every_min(plan),
            "budget_min_bytes_per_second": budget_min(work, plan.network) if _has_budget(plan) else None,
            "changes": [
                {"settings": dict(change.settings), "text": change.text, "factor": float(change.factor)}
                for change in find_changes(plan)
            ],
        },
    }


def _round_document(plan: Plan) -> dict[str, Any]:
    work, settings, time = plan.workload, plan.workload.settings, plan.need.round_time
    count = len(work.fragments)
    egress = _of_kind(plan, FlowKind.EGRESS)
    return {
        "contribution_bytes": work.total(settings.codec_up) / count,
        "merged_bytes": work.total(settings.codec_down) / count,
        "wire_bytes_per_region": max(flow.cycle for flow in egress) / count,
        "wire_bytes_total": sum(flow.cycle for flow in egress) / count,
        "latency_seconds": time.latency_ns / NS_PER_S,
        "boundary_seconds": time.boundary_ns / NS_PER_S,
        "transfer_seconds": time.transfer_ns / NS_PER_S if plan.network.has_limits else None,
        "total_seconds": time.total_ns / NS_PER_S if plan.network.has_limits else None,
        "overlap_seconds": time.overlap_ns / NS_PER_S,
        "fits_overlap": time.is_hidden if plan.network.has_limits else None,
    }


def _flow_document(plan: Plan, flow: Flow) -> dict[str, Any]:
    peak = plan.peak(flow)
    return {
        "kind": str(flow.kind),
        "region": flow.region,
        "peer": flow.peer or None,
        "wire_bytes_per_round": flow.cycle / len(plan.workload.fragments),
        "average_bytes_per_second": float(plan.average(flow)),
        "peak_bytes_per_second": None if peak is None else float(peak),
        "limit_bytes_per_second": flow.limit_bytes_per_s,
    }


def render(plan: Plan, inputs: Mapping[str, str]) -> list[str]:
    """Verdict first, then the changes that would fit, then the numbers."""
    words, changes = verdict(plan), find_changes(plan)
    width = output_width()
    lines = [*_head(plan, inputs), "", f"{words[:1].upper()}{words[1:]}."]
    if changes:
        rows = [(f"{number}.", str(change), change.text) for number, change in enumerate(changes, start=1)]
        table = table_lines([("", "left"), ("set", "left"), ("that is", "left")], rows, width=width)
        lines += ["Any one of these fits, the smallest change first:", *table]
    lines += _spare(plan)
    tables = [*_traffic_table(plan), "", *_round_table(plan, width), "", *_storage_table(plan, width), ""]
    return [*_to_width(lines, width), "", *tables, *_to_width(_notes(plan), width)]


def _to_width(lines: Iterable[str], width: int | None) -> list[str]:
    return [
        row for line in lines for row in ([line] if width is None or len(line) <= width else wrap_text(line, width))
    ]


def _head(plan: Plan, inputs: Mapping[str, str]) -> Iterable[str]:
    work, settings = plan.workload, plan.workload.settings
    largest = max(fragment.values for fragment in work.fragments)
    mean = work.values / len(work.fragments)
    size = (
        f"{human_count(mean)} each"
        if largest - mean < 1
        else f"{human_count(mean)}, the largest {human_count(largest)}"
    )
    yield f"{human_count(work.values)} parameters ({inputs['model']}) in {len(work.fragments)} fragments of {size}"
    step = f"{_seconds(work.step_time_ns)} a step{_mark(inputs['step_time'])}"
    rtt = f"round trip {_seconds(plan.network.rtt_ns)}{_mark(inputs['rtt'])}"
    yield f"{len(work.regions)} region{'s' if len(work.regions) > 1 else ''}, {step}, {rtt}"
    if "mesh" in inputs:
        yield f"{inputs['mesh']}; such a pair counts as a link without a limit"
    yield (
        f"H = {settings.sync_every}, tau = {settings.overlap_steps}, {settings.rounds_in_flight_max} rounds in flight, "
        f"{settings.codec_up} up and {settings.codec_down} down: {float(mean_bits(settings)):g} bits a value on average"
    )


def _mark(origin: str) -> str:
    return f" ({origin})" if origin == ASSUMED else ""


def _spare(plan: Plan) -> Iterable[str]:
    least = sync_every_min(plan)
    if not plan.fits or not plan.network.has_limits or least is None:
        return
    if least < plan.workload.settings.sync_every:
        yield f"H could be as low as {least}."
    if _has_budget(plan):
        rate = budget_min(plan.workload, plan.network)
        if rate is not None:
            yield f"The least budget that keeps this schedule is {format_rate(rate)} in and out of every region."


def _traffic_table(plan: Plan) -> list[str]:
    columns = (("wire traffic", "left"), *((name, "right") for name in ("a round", "average", "peak", "limit", "used")))
    flows, count = list(_traffic_rows(plan)), len(plan.workload.fragments)
    rows: list[tuple[str, ...]] = []
    for name, flow in flows[:ROWS_MAX]:
        peak, limit = plan.peak(flow), flow.limit_bytes_per_s
        rows.append(
            (
                name,
                human_bytes(flow.cycle / count),
                format_rate(plan.average(flow)),
                "-" if peak is None else format_rate(peak),
                "-" if limit is None else format_rate(limit),
                "-" if limit is None else f"{float(100 * plan.average(flow) / limit):.0f} %",
            )
        )
    if len(flows) > ROWS_MAX:
        rows.append((f"and {len(flows) - ROWS_MAX} lines with more room (--json has all)", *[""] * 5))
    sent_bytes = sum(flow.cycle for flow in _of_kind(plan, FlowKind.EGRESS)) / count
    return table_lines(columns, [*rows, ("all regions together", human_bytes(sent_bytes), *[""] * 4)])


def _traffic_rows(plan: Plan) -> Iterable[tuple[str, Flow]]:
    """Lines that are alike are one row; else regions by name, then links, the busiest first."""
    for kind, words in ((FlowKind.EGRESS, "out of"), (FlowKind.INGRESS, "into"), (FlowKind.LINK, "link")):
        flows = _of_kind(plan, kind)
        if len({flow.limit_bytes_per_s for flow in flows}) == 1 and len(flows) > 1:
            name = f"each of {len(flows)} links" if kind is FlowKind.LINK else f"{words} each region"
            yield name, flows[0]
            continue
        for flow in sorted(flows, key=lambda flow: -flow.duration_ns(flow.cycle)):
            yield (f"{flow.region} to {flow.peer}" if kind is FlowKind.LINK else f"{words} {flow.region}"), flow


def _round_table(plan: Plan, width: int | None) -> list[str]:
    time, step_ns = plan.need.round_time, plan.workload.step_time_ns
    columns = (("a round, due to applied", "left"), ("time", "right"), ("steps", "right"), ("", "left"))
    overlap_words = "the round ends within it"
    if not time.is_hidden:
        steps = -(-time.total_ns // step_ns)
        overlap_words = f"the round takes longer: learners never wait, but expect {steps} steps of overlap"
    times = [
        ("eight one-way delays", time.latency_ns, ""),
        ("two step boundaries", time.boundary_ns, "half a step each on average"),
        ("transfer", time.transfer_ns, "" if plan.network.has_limits else "no limit given"),
        ("together", time.total_ns, ""),
        ("overlap, tau steps", time.overlap_ns, overlap_words),
    ]
    return table_lines(
        columns,
        [(name, _seconds(duration_ns), f"{duration_ns / step_ns:.2f}", words) for name, duration_ns, words in times],
        width=width,
    )


def _storage_table(plan: Plan, width: int | None) -> list[str]:
    columns = (("memory and disk of a region", "left"), ("bytes", "right"), ("per parameter", "right"), ("", "left"))
    words = {
        "daemon": "momentum",
        "restart": "more after a start of the daemon, until each fragment's next round: parameters",
        "base": "more in a learner of several types or ranks, or that encodes on a GPU",
        "copies": "in the learner, beside its own model and optimizer: AdamW's moments, for checkpoints",
        "rooms": "more in a learner on a GPU: page-locked, and as much on the GPU",
        "shared": "between the two: parameters, fragments in, encoded contributions out",
        "freed": "by the daemon, kept for the next round, at most",
        "rounds": "in flight: snapshots, stripes, sums, payloads",
        "checkpoints": "two states, and two of the learner's optimizer",
        "payloads": "at most, for regions that come back",
    }
    sums = (("memory together", plan.storage.memory), ("disk together", plan.storage.disk))
    rows = [
        (name, human_bytes(size), f"{size / plan.workload.values:.2f} B", words.get(name, ""))
        for name, size in (*_storage_parts(plan), *sums)
    ]
    return table_lines(columns, rows, width=width)


def _storage_parts(plan: Plan) -> Sequence[tuple[str, int]]:
    sizes = plan.storage
    names = ("daemon", "shared", "freed", "rounds", "copies", "restart", "base", "rooms", "checkpoints", "payloads")
    return [(name, getattr(sizes, name)) for name in names]


def _notes(plan: Plan) -> Iterable[str]:
    if plan.network.links:
        yield "Links were measured in payload; their limits here include the overhead."
    if not plan.network.is_budgeted:
        yield "Each region's line is taken to be as fast as its best link; if it is faster, say so with --budget."
    peak = "Peak: what ends a round of the largest fragment within tau steps"
    late = "; no rate would, the delays alone take longer" if plan.peak(plan.flows[0]) is None else ""
    yield f"{peak}{late}. Scales and {float(100 * plan.workload.overhead):g} % overhead are counted, zstd is not."


def human_count(count: float) -> str:
    """5 B, 208 M, 131 k."""
    for size, unit in ((10**12, " T"), (10**9, " B"), (10**6, " M"), (10**3, " k")):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return f"{count:.4g}"


def _seconds(ns: int) -> str:
    return f"{ns / NS_PER_S:.4g} s" if ns >= NS_PER_S else f"{ns / 1e6:.3g} ms"


def _of_kind(plan: Plan, kind: FlowKind) -> list[Flow]:
    return [flow for flow in plan.flows if flow.kind is kind]


def _has_budget(plan: Plan) -> bool:
    return plan.network.is_budgeted and bool(plan.network.egress or plan.network.ingress)
