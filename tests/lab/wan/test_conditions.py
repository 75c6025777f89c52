"""Cuts and changes in force, and the timetable that makes them."""

import pytest

from diloco_node.config.units import Rate
from diloco_node.errors import ConfigError
from diloco_node.lab.wan.conditions import Conditions, Timetable
from diloco_node.lab.wan.topology import Outage, PathChange, Scope, parse_topology

S = 10**9
TEXT = "".join(f'[regions.{name}]\negress = "1Gbit/s"\n' for name in "abc") + '[default_link]\nrtt = "40ms"\n'


@pytest.fixture
def conditions() -> Conditions:
    return Conditions(parse_topology(TEXT, name="t"))


def open_pairs(conditions: Conditions) -> set[str]:
    return {source + target for source, target in conditions.topology.paths if conditions.path(source, target)}


ALL = {"ab", "ba", "ac", "ca", "bc", "cb"}


def test_a_region_is_cut_from_everyone_or_one_way_or_from_one(conditions: Conditions) -> None:
    assert open_pairs(conditions) == ALL
    conditions.cut(Scope("b"))
    assert open_pairs(conditions) == {"ac", "ca"}
    conditions.heal(Scope("b"))
    conditions.cut(Scope("b", "", "in"))
    assert open_pairs(conditions) == ALL - {"ab", "cb"}
    conditions.heal(Scope("b"))
    conditions.cut(Scope("b", "c", "out"))
    assert open_pairs(conditions) == ALL - {"bc"}


def test_overlapping_cuts_heal_independently(conditions: Conditions) -> None:
    conditions.cut(Scope("a"))
    conditions.cut(Scope("b"))
    assert conditions.heal(Scope("a")) == 1
    assert open_pairs(conditions) == {"ac", "ca"}
    assert conditions.heal(Scope("b")) == 1
    assert open_pairs(conditions) == ALL


def test_healing_a_region_takes_back_all_that_names_it_and_a_narrow_heal_only_its_own(conditions: Conditions) -> None:
    conditions.cut(Scope("a", "b"))
    conditions.cut(Scope("b", "c", "in"))
    conditions.change(Scope("c"), PathChange(loss_ppm=5))
    assert conditions.heal(Scope("b", "c")) == 0
    assert conditions.heal(Scope("b", "c", "in")) == 1
    assert conditions.lines() == ["cut a - b", "changed c"]
    assert conditions.heal(Scope("b")) == 1
    assert conditions.lines() == ["changed c"]


def test_a_change_replaces_only_what_it_names_and_later_ones_come_on_top(conditions: Conditions) -> None:
    conditions.change(Scope("a"), PathChange(delay_ns=7, loss_ppm=9))
    conditions.change(Scope("a", "b", "out"), PathChange(rate=Rate(1000), loss_ppm=1))
    path = conditions.path("a", "b")
    assert path is not None
    assert (path.delay_ns, path.loss_ppm, path.rate) == (7, 1, Rate(1000))
    back = conditions.path("b", "a")
    assert back is not None
    assert (back.delay_ns, back.loss_ppm, back.rate) == (7, 9, None)
    assert conditions.path("b", "c") == conditions.topology.paths["b", "c"]


def test_unknown_regions_are_refused(conditions: Conditions) -> None:
    for scope in (Scope("z"), Scope("a", "z")):
        with pytest.raises(ConfigError, match="'z' is not in topology t"):
            conditions.cut(scope)
        with pytest.raises(ConfigError, match="it has a, b, c"):
            conditions.heal(scope)


def test_the_timetable_cuts_and_heals_on_time(conditions: Conditions) -> None:
    outages = [
        Outage(10 * S, 5 * S, Scope("a")),
        Outage(12 * S, 10 * S, Scope("b", "", "out")),
        Outage(12 * S, 1 * S, Scope("c"), PathChange(loss_ppm=3)),
    ]
    timetable = Timetable(outages, started_ns=100 * S)
    seen = []
    for _ in range(10):
        if timetable.wake_at_ns is None:
            break
        now_ns = timetable.wake_at_ns
        assert timetable.advance(conditions, now_ns=now_ns - 1) == []
        lines = timetable.advance(conditions, now_ns=now_ns)
        seen.append((now_ns // S - 100, lines, conditions.lines()))
    assert seen == [
        (10, ["a: cut"], ["cut a"]),
        (12, ["b -> all: cut", "c: degraded"], ["cut a", "cut b -> all", "changed c"]),
        (13, ["c: healed"], ["cut a", "cut b -> all"]),
        (15, ["a: healed"], ["cut b -> all"]),
        (22, ["b -> all: healed"], []),
    ]


def test_an_outage_that_follows_at_once_is_not_taken_back_by_the_end_of_the_one_before(conditions: Conditions) -> None:
    timetable = Timetable([Outage(0, 5, Scope("a")), Outage(5, 5, Scope("a"))], started_ns=0)
    timetable.advance(conditions, now_ns=5)
    assert conditions.lines() == ["cut a"]
    timetable.advance(conditions, now_ns=10)
    assert conditions.lines() == []


def test_a_timetable_that_was_asleep_catches_up_in_order(conditions: Conditions) -> None:
    timetable = Timetable([Outage(0, 5, Scope("a")), Outage(3, 50, Scope("b"))], started_ns=0)
    assert timetable.advance(conditions, now_ns=20) == ["a: cut", "b: cut", "a: healed"]
    assert conditions.lines() == ["cut b"]
    assert timetable.wake_at_ns == 53


def test_the_end_of_an_outage_leaves_a_cut_made_by_hand_elsewhere(conditions: Conditions) -> None:
    timetable = Timetable([Outage(0, 5, Scope("a"))], started_ns=0)
    timetable.advance(conditions, now_ns=0)
    conditions.cut(Scope("a", "b"))
    timetable.advance(conditions, now_ns=5)
    assert conditions.lines() == ["cut a - b"]
