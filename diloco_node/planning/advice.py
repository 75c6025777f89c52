"""Single changes that make a schedule fit its links, and the line that a running node says about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Final

from diloco_node.core.types import Codec, RunSettings
from diloco_node.numeric import NS_PER_S
from diloco_node.planning.plan import (
    OVERHEAD,
    FlowKind,
    FragmentSize,
    Network,
    Plan,
    Workload,
    cycle_need,
    list_flows,
    make_plan,
)

RATE_MAX: Final = 10**14 // 8
"""Bytes per second (100 Tbit/s) beyond which a search gives up."""

ROUNDS_IN_FLIGHT_LIMIT: Final = 64
SYNC_EVERY_LIMIT: Final = 100_000
TIGHT: Final = Fraction(5, 100)
"""Less slack than this is named: a budget is used up to 95 % when there is work."""

_UNITS: Final = ((10**12, "Tbit/s"), (10**9, "Gbit/s"), (10**6, "Mbit/s"), (10**3, "kbit/s"), (1, "bit/s"))
_DIGITS: Final = 3

BITS: Final = {Codec.INT4: 4, Codec.INT8: 8, Codec.BF16: 16, Codec.FP32: 32}


@dataclass(frozen=True, slots=True)
class Change:
    """A change that makes it fit, with everything else as it is.

    settings: what to set, as (key, value): ("rounds.sync_every", "27"), ("budget", "2.5Gbit/s"). text: the same in
    words, with what it is now. factor: how much larger or smaller the changed quantity becomes, above 1.
    """

    settings: tuple[tuple[str, str], ...]
    text: str
    factor: Fraction

    def __str__(self) -> str:
        return ", ".join(f"{key} = {value}" for key, value in self.settings)


def mean_bits(settings: RunSettings) -> Fraction:
    """Bits per value, scales left out, averaged over both directions: int4 up and int8 down is 6."""
    return Fraction(BITS[settings.codec_up] + BITS[settings.codec_down], 2)


def find_changes(plan: Plan) -> tuple[Change, ...]:
    """Changes each of which makes a plan fit, by itself: those of one setting first, then by how much they change it.
    None if it fits."""
    if plan.fits:
        return ()
    candidates = (_longer_cycle(plan), _fewer_bits(plan), _larger_budget(plan), _more_rounds(plan))
    changes = [change for change in candidates if change is not None]
    return tuple(sorted(changes, key=lambda change: (len(change.settings), change.factor)))


def sync_every_min(plan: Plan) -> int | None:
    """The smallest H that these links keep; always more than tau. None: not even the largest allowed one."""
    steps = -(-plan.need.cycle_ns // plan.workload.step_time_ns)
    smallest = max(steps, plan.workload.settings.overlap_steps + 1)
    return smallest if smallest <= SYNC_EVERY_LIMIT else None


def budget_min(workload: Workload, network: Network) -> int | None:
    """The smallest egress and ingress, in wire bytes per second of every region, that keeps the schedule. None: links
    or delays are what is too slow."""
    return _least(lambda rate: fits(workload, network.with_budget(rate)), low=1, high=RATE_MAX)


def fits(workload: Workload, network: Network) -> bool:
    """The schedule can be kept."""
    return cycle_need(workload, network, list_flows(workload, network)).cycle_ns <= workload.cycle_ns


def with_settings(workload: Workload, **values: object) -> Workload:
    """The workload under other `RunSettings`."""
    return replace(workload, settings=replace(workload.settings, **values))  # type: ignore[arg-type]


def _longer_cycle(plan: Plan) -> Change | None:
    now = plan.workload.settings.sync_every
    steps = sync_every_min(plan)
    if steps is None:
        return None
    text = f"merge each fragment every {steps} steps instead of {now}"
    return Change((("rounds.sync_every", str(steps)),), text, Fraction(steps, now))


def _fewer_bits(plan: Plan) -> Change | None:
    """The pair of codecs that changes the fewest settings, and of those keeps the most bytes."""
    now = plan.workload.settings
    size_now = plan.workload.total(now.codec_up) + plan.workload.total(now.codec_down)
    best: tuple[int, int, RunSettings] | None = None
    for up, down in product(Codec, Codec):
        settings = replace(now, codec_up=up, codec_down=down)
        size = plan.workload.total(up) + plan.workload.total(down)
        if BITS[up] > BITS[now.codec_up] or BITS[down] > BITS[now.codec_down] or size >= size_now:
            continue
        rank = ((up != now.codec_up) + (down != now.codec_down), -size)
        if (best is None or rank < best[:2]) and fits(replace(plan.workload, settings=settings), plan.network):
            best = (*rank, settings)
    if best is None:
        return None
    settings = best[2]
    sizes = [sum(map(plan.workload.total, (codecs.codec_up, codecs.codec_down))) for codecs in (now, settings)]
    pairs = [
        ("rounds.codec_up", now.codec_up, settings.codec_up),
        ("rounds.codec_down", now.codec_down, settings.codec_down),
    ]
    differences = [(key, old, new) for key, old, new in pairs if old != new]
    words = " and ".join(
        f"{new} instead of {old} {'up' if key.endswith('up') else 'down'}" for key, old, new in differences
    )
    text = f"{words}: {_number(mean_bits(settings))} bits a value on average instead of {_number(mean_bits(now))}"
    return Change(tuple((key, f'"{new}"') for key, _, new in differences), text, Fraction(*sizes))


def _larger_budget(plan: Plan) -> Change | None:
    limits = (*plan.network.egress.values(), *plan.network.ingress.values())
    if not limits:
        return None
    # Those of the regions that have more stay as they are.
    least_rate = _least(lambda rate: fits(plan.workload, plan.network.with_budget_at_least(rate)), low=1, high=RATE_MAX)
    if least_rate is None or least_rate <= min(limits):
        return None
    text = f"at least {format_rate(least_rate)} in and out of every region; the least now is {format_rate(min(limits))}"
    key = "budget" if plan.network.is_budgeted else "line of each region"
    return Change(((key, f'"{rate_setting(least_rate)}"'),), text, Fraction(least_rate, min(limits)))


def _more_rounds(plan: Plan) -> Change | None:
    now = plan.workload.settings.rounds_in_flight_max
    rounds = _least(
        lambda count: fits(with_settings(plan.workload, rounds_in_flight_max=count), plan.network),
        low=now + 1,
        high=min(ROUNDS_IN_FLIGHT_LIMIT, len(plan.workload.fragments)),
    )
    if rounds is None:
        return None
    text = f"{rounds} rounds open at once instead of {now}, so that one transfers while others wait"
    return Change((("rounds.rounds_in_flight_max", str(rounds)),), text, Fraction(rounds, now))


def _least(is_enough: Callable[[int], bool], *, low: int, high: int) -> int | None:
    """The smallest of [low, high] that is enough; None if none is. Once enough, more stays enough."""
    if low > high or not is_enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return low


def verdict(plan: Plan) -> str:
    """Sum up in a line: does it fit, by how much, and what decides."""
    if not plan.fits:
        rate, factor = "" if plan.network.has_limits else ", whatever the rate", 1 - plan.slack
        more = f"{float(100 * (factor - 1)):.1f} %" if factor < 2 else f"{float(factor):.1f} times"
        return (
            f"does not fit{rate}: a cycle of H = {plan.workload.settings.sync_every} steps is {more} too short; "
            f"{_decides(plan)}; as it is, each fragment is merged every {float(plan.sync_every_kept):.1f} steps"
        )
    if not plan.network.has_limits:
        return "fits, as far as delays go: neither a budget nor a mesh was given"
    tight = ", which is tight: a budget is used up to 95 %" if plan.slack < TIGHT else ""
    return f"fits: {float(100 * plan.slack):.1f} % slack{tight}; {_decides(plan)}"


def _decides(plan: Plan) -> str:
    if plan.need.busiest is None or plan.need.flight_ns > plan.need.bytes_ns:
        return _flight(plan)
    flow = plan.need.busiest
    limit = format_rate(flow.limit_bytes_per_s or 0)
    same = [peer_flow for peer_flow in plan.flows if peer_flow.kind is flow.kind]
    is_alike = flow.kind is not FlowKind.LINK and len({peer_flow.limit_bytes_per_s for peer_flow in same}) == 1
    line = f"{flow.kind} of each region" if is_alike else str(flow)
    return f"{line} needs {format_rate(plan.average(flow))} of {limit}"


def _flight(plan: Plan) -> str:
    steps = Fraction(plan.need.round_time.total_ns, plan.workload.step_time_ns)
    count = plan.workload.settings.rounds_in_flight_max
    period = Fraction(plan.workload.settings.sync_every, len(plan.workload.fragments))
    open_words = "1 is" if count == 1 else f"{count} are"
    return (
        f"a round takes {float(steps):.2f} steps and at most {open_words} open at once, but one is due every "
        f"{'step' if period == 1 else f'{_number(period)} steps'}"
    )


def _number(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.3g}"


def budget_warning(
    *,
    fragments: Sequence[FragmentSize],
    settings: RunSettings,
    regions: Sequence[str],
    step_time_ns: int,
    rtt_ns: int,
    egress_bytes_per_s: int | None,
    ingress_bytes_per_s: int | None,
    overhead: Fraction = OVERHEAD,
) -> str:
    """Warn when a running node can't keep its schedule within its budget: what is needed, what there is, what happens,
    and each single change that would fit; "" when it can.

    regions: the live ones. step_time_ns: median of the live learners; 0 (unknown) gives "". rtt_ns: the largest to a
    live peer; 0 when unknown. egress_bytes_per_s, ingress_bytes_per_s: this node's own budget now, wire bytes; None: no
    limit. All regions are taken to have the same. overhead: as learnt from the kernel's counters, a part of the
    payload.
    """
    if step_time_ns <= 0 or not fragments or len(regions) < 2:
        return ""
    names = tuple(sorted(regions))
    network = Network(
        rtt_ns=rtt_ns,
        egress={} if egress_bytes_per_s is None else dict.fromkeys(names, egress_bytes_per_s),
        ingress={} if ingress_bytes_per_s is None else dict.fromkeys(names, ingress_bytes_per_s),
    )
    plan = make_plan(Workload(tuple(fragments), names, settings, step_time_ns, overhead), network)
    if plan.fits or not network.has_limits:
        return ""
    changes = find_changes(plan)
    remedy = "; any one of these would do: " + "; ".join(str(change) for change in changes) if changes else ""
    return (
        f"the schedule can't be kept within the budget, H = {settings.sync_every} at {step_time_ns / NS_PER_S:.3g} s a "
        f"step: {_decides(plan)}; each fragment is merged every {float(plan.sync_every_kept):.1f} steps instead{remedy}"
    )


def format_rate(bytes_per_s: float | Fraction) -> str:
    """Three digits in bits: `2.03 Gbit/s`."""
    bits = 8 * float(bytes_per_s)
    # 999.6 Mbit/s would be shown as "1e+03": a unit begins where three digits of the one below end.
    size, unit = next((pair for pair in _UNITS if bits >= 0.9995 * pair[0]), _UNITS[-1])
    number = bits / size
    digits = 0 if number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {unit}"


def rate_setting(bytes_per_s: int) -> str:
    """A rate of at least this much as it is written in settings, rounded up to three digits: `2.04Gbit/s`."""
    bits = 8 * bytes_per_s
    size, unit = next((pair for pair in _UNITS if bits >= pair[0]), _UNITS[-1])
    step = Fraction(max(1, 10 ** (len(str(bits)) - _DIGITS)))
    ceiling = -(-bits // step) * step / size
    return f"{float(ceiling):.{_DIGITS - 1}f}".rstrip("0").rstrip(".") + unit
