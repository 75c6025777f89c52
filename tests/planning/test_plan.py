"""What a schedule needs, by hand and by property; the advice is applied and must work."""

import os
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.merge.fragments import TensorSpec, build_manifest
from diloco_node.core.types import Codec, RunSettings
from diloco_node.daemon.process_setup import KEPT_BYTES_MAX
from diloco_node.learner.checkpoint import Checkpoint, TrainingProgress, write_checkpoint
from diloco_node.learner.contribution_area import area_sizes
from diloco_node.planning.advice import (
    Change,
    budget_min,
    budget_warning,
    find_changes,
    fits,
    format_rate,
    mean_bits,
    rate_setting,
    sync_every_min,
    verdict,
    with_settings,
)
from diloco_node.planning.plan import (
    FlowKind,
    FragmentSize,
    Network,
    Plan,
    Workload,
    even_sizes,
    fragment_sizes,
    make_plan,
    storage,
)
from diloco_node.storage.store import RegionStore
from diloco_node.storage.tensor_files import HEADER_BYTES

MS = 1_000_000
SECOND = 1000 * MS
NAMES = ("a", "b", "c", "d")
# Sizes that a person can divide: 400 bytes up, 800 down, whatever the codec's scales.
SMALL = FragmentSize(1000, {Codec.INT4: 400, Codec.INT8: 800, Codec.BF16: 2000, Codec.FP32: 4000})
LARGE = FragmentSize(2000, {Codec.INT4: 800, Codec.INT8: 1600, Codec.BF16: 4000, Codec.FP32: 8000})


def workload(**changed: object) -> Workload:
    """P = 2 fragments of 1000 and 2000 values, four regions, H = 10 steps of 1 s, no overhead."""
    run = RunSettings(fragments=2, sync_every=10, overlap_steps=4)
    given_settings = replace(run, **{key: value for key, value in changed.items() if hasattr(run, key)})
    rest = {key: value for key, value in changed.items() if not hasattr(run, key)} | {"settings": given_settings}
    base = Workload((SMALL, LARGE), NAMES, run, SECOND, Fraction(0))
    return replace(base, **{"fragments" if key == "sizes" else key: value for key, value in rest.items()})


def network(rate: int | None = None, *, rtt_ns: int = 0, links: int | None = None) -> Network:
    pairs = [(a, b) for a in NAMES for b in NAMES if a != b]
    limits = {} if rate is None else dict.fromkeys(NAMES, rate)
    return Network(rtt_ns, limits, dict(limits), {} if links is None else dict.fromkeys(pairs, links))


# ---- bytes -----------------------------------------------------------------------------------------------------------


def test_a_region_sends_and_receives_three_quarters_of_both_directions_in_four_regions() -> None:
    plan = make_plan(workload(), network())
    kinds = {kind: [flow for flow in plan.flows if flow.kind is kind] for kind in FlowKind}
    assert [len(kinds[kind]) for kind in FlowKind] == [4, 4, 12]
    for flow in kinds[FlowKind.EGRESS] + kinds[FlowKind.INGRESS]:
        assert (flow.cycle_up, flow.cycle_down, flow.largest) == (900, 1800, 1800)
        assert plan.average(flow) == 270  # 2700 bytes in 10 s
    for flow in kinds[FlowKind.LINK]:
        assert (flow.cycle_up, flow.cycle_down, flow.largest) == (300, 600, 600)


def test_the_order_of_regions_changes_nothing() -> None:
    assert make_plan(workload(regions=NAMES[::-1]), network(900)).flows == make_plan(workload(), network(900)).flows


def test_overhead_is_added_once_and_rounded_up() -> None:
    flow = make_plan(workload(overhead=Fraction(6, 100)), network()).flows[0]
    assert (flow.cycle_up, flow.cycle_down) == (954, 1908)
    assert workload(overhead=Fraction(1, 3)).wire(100) == 134


def test_one_region_alone_needs_nothing() -> None:
    plan = make_plan(workload(regions=("a",)), network(1, rtt_ns=SECOND))
    assert {flow.cycle for flow in plan.flows} == {0}
    assert plan.fits
    assert plan.need.cycle_ns == 0


@given(
    count=st.integers(2, 9),
    up=st.sampled_from(list(Codec)),
    down=st.sampled_from(list(Codec)),
    values=st.integers(200, 10**7),
    fragments=st.integers(1, 40),
)
def test_what_is_sent_is_received_and_is_what_the_links_carry(
    count: int, up: Codec, down: Codec, values: int, fragments: int
) -> None:
    names = tuple(f"r{index}" for index in range(count))
    work = Workload(even_sizes(values, fragments), names, RunSettings(codec_up=up, codec_down=down), SECOND)
    flows = make_plan(work, Network(0)).flows
    total = {kind: sum(flow.cycle for flow in flows if flow.kind is kind) for kind in FlowKind}
    assert total[FlowKind.EGRESS] == total[FlowKind.INGRESS]
    assert 0 <= total[FlowKind.LINK] - total[FlowKind.EGRESS] <= 2 * count * count  # each line is rounded up alone
    payload = work.total(up) + work.total(down)
    exact = payload * (count - 1) * (1 + work.overhead)
    assert 0 <= total[FlowKind.EGRESS] - exact <= 4 * count * count


def test_sizes_of_a_manifest_are_those_of_the_encoder() -> None:
    tensors = [TensorSpec("embed", (300, 64)), TensorSpec("norm", (100,)), TensorSpec("w", (257, 33))]
    manifest = build_manifest(tensors, 3)
    for fragment, size in zip(manifest.fragments, fragment_sizes(manifest), strict=True):
        assert size.values == fragment.size
        for codec in Codec:
            assert size.encoded[codec] == FragmentBlocks(fragment.piece_sizes, codec).encoded_bytes


def test_even_fragments_hold_every_value_and_differ_by_one() -> None:
    sizes = even_sizes(1_000_003, 24)
    assert sum(size.values for size in sizes) == 1_000_003
    assert {size.values for size in sizes} == {41_666, 41_667}
    with pytest.raises(ValueError, match="3 values"):
        even_sizes(3, 4)


# ---- time ------------------------------------------------------------------------------------------------------------


def test_a_round_is_eight_one_way_delays_two_half_steps_and_both_transfers() -> None:
    plan = make_plan(workload(), network(900, rtt_ns=50 * MS))
    time = plan.need.round_time
    assert (time.latency_ns, time.boundary_ns) == (200 * MS, SECOND)
    assert time.transfer_ns == 1_500 * MS  # a cycle of two rounds: 900 / 900 s up, 1800 / 900 s down
    assert time.total_ns == 2_700 * MS
    assert time.overlap_ns == 4 * SECOND
    assert time.is_hidden
    assert plan.need.bytes_ns == 3 * SECOND
    assert plan.need.flight_ns == 2_700 * MS  # two rounds, two at a time


def test_the_slowest_line_decides_a_transfer_and_is_named() -> None:
    net = replace(network(900), links={("c", "a"): 30})
    plan = make_plan(workload(), net)
    assert plan.need.bytes_ns == 30 * SECOND  # 900 bytes over 30 a second
    assert str(plan.need.busiest) == "link c to a"
    assert not plan.fits
    assert plan.slack == -2
    assert plan.sync_every_kept == 30


def test_peak_ends_a_round_of_the_largest_fragment_within_the_overlap() -> None:
    plan = make_plan(workload(), network(rtt_ns=250 * MS))
    flow = plan.flows[0]
    assert plan.peak(flow) == 900  # 1800 bytes in 4 s - 1 s - 1 s; rounds 5 s apart do not overlap
    # A window of 6 s and a round every 5 s: two at once.
    longer = make_plan(workload(overlap_steps=8), network(rtt_ns=250 * MS))
    assert longer.peak(flow) == 600
    single = make_plan(workload(overlap_steps=8, rounds_in_flight_max=1), network(rtt_ns=250 * MS))
    assert single.peak(flow) == 300
    assert make_plan(workload(overlap_steps=1), network()).peak(flow) is None  # nothing is left of the window


def test_peak_is_never_below_the_average() -> None:
    plan = make_plan(workload(overlap_steps=9, sync_every=10, rounds_in_flight_max=1, sizes=(LARGE,) * 8), network())
    assert plan.peak(plan.flows[0]) == plan.average(plan.flows[0])


def test_delays_alone_can_be_too_much() -> None:
    plan = make_plan(workload(rounds_in_flight_max=1), network(rtt_ns=1_100 * MS))
    assert plan.need.flight_ns == 2 * 5_400 * MS
    assert not plan.fits
    assert "whatever the rate" in verdict(plan)
    assert make_plan(workload(), network(rtt_ns=1_100 * MS)).fits


# ---- memory and disk -------------------------------------------------------------------------------------------------


def test_storage_by_hand() -> None:
    sizes = storage(workload(payload_versions=3, checkpoint_versions=5))
    assert (sizes.daemon, sizes.restart, sizes.base, sizes.checkpoints) == (12_000, 12_000, 12_000, 96_000)
    assert (sizes.copies, sizes.rooms) == (24_000, 6 * 8_000)
    assert sizes.shared == 4 * 8_000 + 1_200
    assert sizes.payloads == (5 + 5) * 2_400
    # Two rounds of: a snapshot, four stripes of 200, a float sum of 500 values, the merged fragment.
    assert sizes.rounds == 2 * (8_000 + 800 + 2_000 + 1_600)
    assert sizes.freed == KEPT_BYTES_MAX
    assert sizes.memory == 12_000 + 24_000 + 33_200 + sizes.freed + sizes.rounds
    assert sizes.disk == 96_000 + 24_000
    assert storage(workload(sizes=(LARGE,))).rounds == sizes.rounds // 2  # one fragment is never in two rounds


def test_storage_is_what_areas_and_files_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most that files and shared memory ever hold in a run is the plan, within 3 %."""
    for sync in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, sync, lambda _: None)  # a thousand files
    fragments, rules = even_sizes(24_000, 24), RunSettings(fragments=24)
    sizes = storage(Workload(fragments, ("a",), rules, step_time_ns=1))
    manifest = build_manifest(
        tuple(TensorSpec(f"t{index}", (size.values,)) for index, size in enumerate(fragments)), 24
    )
    assert sum(area_sizes(manifest, rules.codec_up)) == sizes.shared
    theta, moments = np.zeros(1_000, np.float32), {"m": torch.zeros(2 * 24_000, device="cpu")}
    store, every, most = RegionStore(tmp_path), rules.checkpoint_versions, 0
    store.load(24)
    for version in range(4 * every):
        for index, size in enumerate(fragments):
            store.store_payload(index, version, bytes(32), [bytes(size.encoded[rules.codec_down])])
            if version % every == 0:
                store.store_state(index, version, theta, theta, bytes(16))
                most = max(most, _content_bytes(tmp_path))
                store.prune(index, version - max(every, rules.payload_versions))
        progress = TrainingProgress("", incarnation=1, global_step=version, step=version, tokens=0)
        write_checkpoint(tmp_path / "learner", Checkpoint(progress, moments, {}, {}))
        most = max(most, _content_bytes(tmp_path))
    store.close()
    assert abs(most / sizes.disk - 1) < 0.03, (most / 24_000, sizes.disk / 24_000)


def _content_bytes(folder: Path) -> int:
    """What files hold without their headers, which do not grow with the model."""
    states = sum(path.stat().st_size - HEADER_BYTES for path in folder.rglob("*.bin") if path.name.startswith("f"))
    spares = sum(path.stat().st_size - HEADER_BYTES for path in (folder / "payloads").glob("spare*"))
    return states + spares + sum(2 * 24_000 * 4 for _ in (folder / "learner").glob("*"))


# ---- advice ----------------------------------------------------------------------------------------------------------


def applied(plan: Plan, change: Change) -> tuple[Workload, Network]:
    """The plan's inputs with a change made."""
    work, net = plan.workload, plan.network
    for key, value in change.settings:
        text = value.strip('"')
        match key:
            case "rounds.sync_every" | "rounds.rounds_in_flight_max":
                work = with_settings(work, **{key.removeprefix("rounds."): int(text)})
            case "rounds.codec_up" | "rounds.codec_down":
                work = with_settings(work, **{key.removeprefix("rounds."): Codec(text)})
            case "budget" | "line of each region":
                net = net.with_budget_at_least(setting_bytes(text))
            case _:
                raise AssertionError(key)
    return work, net


def setting_bytes(text: str) -> int:
    from diloco_node.config.units import parse_rate

    return parse_rate(text).bytes_per_s


WORKLOADS = st.builds(
    lambda values, count, regions, step_ms, sync, tau, flight, up, down: Workload(
        even_sizes(values, count),
        tuple(f"r{index}" for index in range(regions)),
        RunSettings(
            fragments=count,
            sync_every=sync + tau,
            overlap_steps=tau,
            rounds_in_flight_max=flight,
            codec_up=up,
            codec_down=down,
        ),
        step_ms * MS,
    ),
    st.integers(10**6, 10**10),
    st.integers(1, 40),
    st.integers(2, 6),
    st.integers(1, 5000),
    st.integers(1, 200),
    st.integers(0, 10),
    st.integers(1, 4),
    st.sampled_from(list(Codec)),
    st.sampled_from(list(Codec)),
)


@settings(deadline=None, max_examples=60)
@given(work=WORKLOADS, rate=st.integers(10**4, 10**10), rtt_ms=st.integers(0, 400), is_mesh=st.booleans())
def test_every_change_that_is_named_fits_and_the_smallest_comes_first(
    work: Workload, rate: int, rtt_ms: int, is_mesh: bool
) -> None:
    limits = dict.fromkeys(work.regions, rate)
    pairs = {(a, b): rate // 2 + 1 for a in work.regions for b in work.regions if a != b} if is_mesh else {}
    plan = make_plan(work, Network(rtt_ms * MS, limits, limits, pairs, is_budgeted=not is_mesh))
    changes = find_changes(plan)
    assert bool(changes) <= (not plan.fits)
    for change in changes:
        assert fits(*applied(plan, change)) or "rounds.fragments" in dict(change.settings), change
        assert change.factor > 1
    ranks = [(len(change.settings), change.factor) for change in changes]
    assert ranks == sorted(ranks)
    text = verdict(plan)
    assert text.startswith("fits" if plan.fits else "does not fit")


@settings(deadline=None, max_examples=60)
@given(work=WORKLOADS, rate=st.integers(10**4, 10**10), rtt_ms=st.integers(0, 400))
def test_the_least_budget_and_the_least_h_are_the_least(work: Workload, rate: int, rtt_ms: int) -> None:
    limits = dict.fromkeys(work.regions, rate)
    plan = make_plan(work, Network(rtt_ms * MS, limits, limits))
    needed = budget_min(work, plan.network)
    if needed is None:
        unlimited = make_plan(work, Network(rtt_ms * MS))
        assert unlimited.slack < Fraction(1, 100)  # only delays can be what no rate helps against
    else:
        assert fits(work, plan.network.with_budget(needed))
        assert needed == 1 or not fits(work, plan.network.with_budget(needed - 1))
        assert plan.fits == (rate >= needed)
    least = sync_every_min(plan)
    if least is not None:
        assert fits(with_settings(work, sync_every=least), plan.network)
        if least > work.settings.overlap_steps + 1:
            assert not fits(with_settings(work, sync_every=least - 1), plan.network)
        assert plan.fits == (work.settings.sync_every >= least)


def test_a_plan_that_fits_exactly_fits_and_one_byte_less_does_not() -> None:
    exact = make_plan(workload(), network(270))
    assert exact.fits
    assert exact.slack == 0
    assert "0.0 % slack, which is tight" in verdict(exact)
    assert find_changes(exact) == ()
    short = make_plan(workload(), network(269))
    assert not short.fits
    assert next(str(change) for change in find_changes(short)) in {'budget = "2.16kbit/s"', "rounds.sync_every = 11"}


def test_codecs_change_as_little_as_is_enough() -> None:
    work = workload(codec_up=Codec.BF16, codec_down=Codec.BF16)
    # A cycle sends 4500 bytes up and 4500 down in bf16; int8 is 1800 each.
    changes = {tuple(dict(change.settings)): change for change in find_changes(make_plan(work, network(640)))}
    assert dict(changes["rounds.codec_up",].settings) == {"rounds.codec_up": '"int8"'}
    assert "int8 instead of bf16 up: 12 bits a value on average instead of 16" in changes["rounds.codec_up",].text
    both = {tuple(dict(change.settings)) for change in find_changes(make_plan(work, network(400)))}
    assert ("rounds.codec_up", "rounds.codec_down") in both
    least = {tuple(dict(change.settings)) for change in find_changes(make_plan(work, network(100)))}
    assert least == {("rounds.sync_every",), ("budget",)}, "no codecs are enough"


def test_h_stays_above_tau_however_fast_the_links_are() -> None:
    assert sync_every_min(make_plan(workload(overlap_steps=7), network(10**12))) == 8


def test_int4_up_and_int8_down_is_six_bits() -> None:
    assert mean_bits(RunSettings()) == 6


def test_where_delays_decide_more_rounds_at_once_are_named() -> None:
    # A round takes 4 x 0.5 + 1 = 3 s besides its transfer; 20 s for rounds two at a time leave room for six of them.
    plan = make_plan(workload(sizes=(SMALL,) * 8), network(10**9, rtt_ns=500 * MS))
    found = {tuple(dict(change.settings)): change for change in find_changes(plan)}
    assert found["rounds.rounds_in_flight_max",].settings == (("rounds.rounds_in_flight_max", "3"),)
    assert make_plan(workload(sizes=(SMALL,) * 6), network(10**9, rtt_ns=500 * MS)).fits
    assert not make_plan(workload(sizes=(SMALL,) * 7), network(10**9, rtt_ns=500 * MS)).fits


def test_a_slow_link_is_named_as_what_decides() -> None:
    net = replace(network(links=300), links=network(links=300).links | {("b", "c"): 50})
    assert "b to c" in verdict(make_plan(workload(), net))


# ---- the named target, and the line a node says ----------------------------------------------------------------------


def target(rate: int, **changed: object) -> Plan:
    """5 B parameters, four regions, 1 s a step, 40 ms."""
    work = with_settings(Workload(even_sizes(5 * 10**9, 24), NAMES, RunSettings(), SECOND), **changed)
    return make_plan(work, network(rate, rtt_ns=40 * MS))


def test_the_named_target_needs_slightly_more_than_two_gigabits() -> None:
    plan = target(250_000_000)
    flow = plan.flows[0]
    # 5e9 x (4 + 32/256 + 8 + 32/256) bits x 3/4 x 1.06, in 24 s
    by_hand = 5e9 * 12.25 * 0.75 * 1.06 / 24
    assert float(8 * plan.average(flow)) == pytest.approx(by_hand, rel=1e-6)
    assert not plan.fits
    assert [str(change) for change in find_changes(plan)] == [
        "rounds.sync_every = 27",
        'budget = "2.42Gbit/s"',
        'rounds.codec_down = "int4"',
    ]
    assert target(250_000_000, sync_every=27).fits
    assert target(302_500_000).fits


def warning(rate: int | None, **changed: object) -> str:
    arguments = {
        "fragments": even_sizes(5 * 10**9, 24),
        "settings": RunSettings(),
        "regions": NAMES,
        "step_time_ns": SECOND,
        "rtt_ns": 40 * MS,
        "egress_bytes_per_s": rate,
        "ingress_bytes_per_s": None,
    }
    return budget_warning(**(arguments | changed))  # type: ignore[arg-type]


def test_a_node_says_in_one_line_what_is_too_small_and_what_would_do() -> None:
    text = warning(100_000_000)
    assert text == (
        "the schedule can't be kept within the budget, H = 24 at 1 s a step: egress of each region needs "
        "2.03 Gbit/s of 800 Mbit/s; each fragment is merged every 60.9 steps instead; any one of these would do: "
        'rounds.sync_every = 61; budget = "2.42Gbit/s"'
    )
    assert "\n" not in text
    assert warning(None, ingress_bytes_per_s=100_000_000).count("ingress of each region needs 2.03 Gbit/s") == 1


def test_a_node_is_silent_when_it_fits_or_does_not_know() -> None:
    assert warning(310_000_000) == ""
    assert warning(None) == ""
    assert warning(1, step_time_ns=0) == ""
    assert warning(1, regions=("a",)) == ""
    assert warning(1, fragments=()) == ""


# ---- rates -----------------------------------------------------------------------------------------------------------


def test_rates_are_read_with_three_digits() -> None:
    shown = [format_rate(rate) for rate in (0, 1, 124.9, 125, 124_960_000, 250_000_000, 12_500_000_000, 10**13)]
    assert shown == [
        "0.00 bit/s",
        "8.00 bit/s",
        "999 bit/s",
        "1.00 kbit/s",
        "1.00 Gbit/s",
        "2.00 Gbit/s",
        "100 Gbit/s",
        "80.0 Tbit/s",
    ]


@given(st.integers(1, 10**13))
def test_a_rate_setting_is_enough_and_at_most_one_percent_more(bytes_per_s: int) -> None:
    there = setting_bytes(rate_setting(bytes_per_s))
    assert bytes_per_s <= there <= bytes_per_s * 1.01 + 1


@pytest.mark.parametrize(
    "changed",
    [{"sizes": ()}, {"regions": ()}, {"regions": ("a", "a")}, {"step_time_ns": 0}, {"overhead": Fraction(-1)}],
)
def test_what_is_no_workload_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"no workload|out of range"):
        workload(**changed)
