"""The topology file: what it says, and what it refuses."""

from pathlib import Path

import pytest

from diloco_node.config.units import Rate
from diloco_node.errors import ConfigError
from diloco_node.lab.wan.topology import Path as WanPath
from diloco_node.lab.wan.topology import (
    PathChange,
    Scope,
    load_topology,
    parse_change,
    parse_loss,
    parse_topology,
)
from tests.kit.repository import ROOT
from tests.kit.wan_probe import rate_of, rtt_ns_of

NETEM = ROOT / "netem"
MS = 10**6
GBIT = 10**9 // 8

TWO = """
[regions.a]
egress = "2Gbit/s"
[regions.b]
egress = "1Gbit/s"
ingress = "500Mbit/s"
"""
LINK = '[[links]]\nbetween = ["a", "b"]\nrtt = "41ms"\n'


def test_a_link_between_two_regions_is_half_its_round_trip_each_way() -> None:
    topology = parse_topology(TWO + LINK + 'jitter = "2ms"\nloss = "0.25%"\nrate = "100Mbit/s"\n', name="t")
    assert topology.names == ("a", "b")
    assert rtt_ns_of(topology, "a", "b") == 41 * MS
    for pair in (("a", "b"), ("b", "a")):
        path = topology.paths[pair]
        assert (path.delay_ns, path.jitter_ns, path.loss_ppm) == (20_500_000, 2 * MS, 2500)
        assert rate_of(topology, *pair).bytes_per_s == 100 * 10**6 // 8


def test_the_rate_of_a_pair_is_the_slowest_part_of_its_way() -> None:
    topology = parse_topology(TWO + LINK, name="t")
    assert rate_of(topology, "a", "b").bytes_per_s == GBIT // 2
    assert rate_of(topology, "b", "a").bytes_per_s == GBIT
    assert topology.region("a").ingress == topology.region("a").egress


def test_directions_may_differ() -> None:
    text = TWO + '[[links]]\nfrom = "a"\nto = "b"\ndelay = "10ms"\n[[links]]\nfrom = "b"\nto = "a"\ndelay = "35ms"\n'
    topology = parse_topology(text, name="t")
    assert [topology.paths[pair].delay_ns for pair in (("a", "b"), ("b", "a"))] == [10 * MS, 35 * MS]


def test_what_a_link_leaves_out_comes_from_the_default() -> None:
    text = TWO + '[regions.c]\negress = "1Gbit/s"\n[default_link]\nrtt = "80ms"\nloss = "1%"\n' + LINK
    topology = parse_topology(text, name="t")
    assert topology.paths["a", "b"] == WanPath(20_500_000, loss_ppm=10_000)
    assert topology.paths["c", "a"] == WanPath(40 * MS, loss_ppm=10_000)


def test_outages_are_cuts_one_way_cuts_or_degraded_links_in_order_of_time() -> None:
    text = (
        TWO
        + LINK
        + '[[outages]]\nat = "30s"\nfor = "5s"\nbetween = ["a", "b"]\nloss = "5%"\ndelay = "1s"\n'
        + '[[outages]]\nat = "10s"\nfor = "20s"\ncut = "b"\n'
        + '[[outages]]\nat = "20s"\nfor = "1s"\ncut = "a"\ndirection = "out"\n'
        + '[[outages]]\nat = "25s"\nfor = "1s"\nfrom = "a"\nto = "b"\n'
    )
    outages = parse_topology(text, name="t").outages
    assert [(one.at_ns // 10**9, one.scope, one.change) for one in outages] == [
        (10, Scope("b"), None),
        (20, Scope("a", "", "out"), None),
        (25, Scope("a", "b", "out"), None),
        (30, Scope("a", "b"), PathChange(delay_ns=10**9, loss_ppm=50_000)),
    ]
    assert [str(one.scope) for one in outages] == ["b", "a -> all", "a -> b", "a - b"]


def test_a_scope_names_its_pairs() -> None:
    names = ("a", "b", "c")
    assert set(Scope("b").pairs(names)) == {("b", "a"), ("b", "c"), ("a", "b"), ("c", "b")}
    assert Scope("b", "", "out").pairs(names) == (("b", "a"), ("b", "c"))
    assert Scope("b", "c", "in").pairs(names) == (("c", "b"),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = [", "is no TOML"),
        (TWO, r"says nothing of a to b: add \[\[links\]\]"),
        ('[regions.a]\negress = "1Gbit/s"\n', "1 regions; it needs 2"),
        (TWO.replace('"2Gbit/s"', "2000"), r"\[regions.a\] egress is 2000: it has no unit"),
        (TWO.replace("egress", "egres", 1), "'egres' is unknown; it takes egress, ingress"),
        (TWO.replace("[regions.a]", "[regions.A_1]") + LINK, "small letters"),
        ('[regions]\na = 3\n[regions.b]\negress = "1Gbit/s"', "must be a table"),
        (TWO + LINK + LINK, "a to b is named twice"),
        (TWO + LINK.replace('"b"', '"z"'), "region 'z' is not in the file; it has a, b"),
        (TWO + LINK.replace('"b"', '"a"'), "two different regions"),
        (TWO + LINK + 'from = "a"\n', "by between = .* or by from"),
        (TWO + '[[links]]\nfrom = "a"\ndelay = "1ms"\n', "two different regions|None"),
        (TWO + LINK + 'delay = "3ms"\n', "either rtt"),
        (TWO + '[[links]]\nfrom = "a"\nto = "b"\nrtt = "3ms"\n', "has a delay, not an rtt"),
        (TWO + LINK.replace("41ms", "41"), "rtt is '41': it has no unit"),
        (TWO + LINK.replace("41ms", "30s"), "longer than 10s"),
        (TWO + LINK + 'jitter = "21ms"\n', "larger than the delay"),
        (TWO + LINK + 'loss = "101%"\n', "between 0% and 100%"),
        (TWO + LINK + "loss = 0.1\n", "in percent"),
        (TWO + LINK + '[wan]\nqueue = "1us"\n', "between 1ms and 10s"),
        (TWO + LINK + '[[outages]]\nfor = "1s"\ncut = "a"\n', "at is missing"),
        (TWO + LINK + '[[outages]]\nat = "1s"\nfor = "0s"\ncut = "a"\n', "an outage lasts"),
        (TWO + LINK + '[[outages]]\nat = "1s"\nfor = "1s"\ncut = "a"\nloss = "1%"\n', "a cut has no delay"),
        (TWO + LINK + '[[outages]]\nat = "1s"\nfor = "1s"\ncut = "a"\ndirection = "up"\n', '"both", "out" or "in"'),
        (TWO + LINK + '[[outages]]\nat = "1s"\nfor = "1s"\n', "name its regions"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_topology(text, name="t")


def test_a_change_is_written_as_in_a_file() -> None:
    change = parse_change({"do": "set", "delay": "80ms", "loss": "1%", "rate": "1kB/s"}, "set")
    assert change == PathChange(delay_ns=80 * MS, loss_ppm=10_000, rate=Rate(1000))
    assert parse_change({"do": "set"}, "set") is None
    for wrong in ({"delay": 5}, {"delay": "11s"}, {"loss": "101%"}, {"jitter": True}, {"rate": "7"}):
        with pytest.raises(ConfigError, match=r"^set (delay|loss|jitter|rate) is "):
            parse_change(wrong, "set")


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        load_topology(tmp_path / "none.toml")


def test_loss_is_exact_in_parts_per_million() -> None:
    assert [parse_loss(text) for text in ("0%", "0.0001%", "0.1%", "1 %", "100%")] == [0, 1, 1000, 10_000, 1_000_000]
    for text in ("", "1", "nan%", "-1%", "x%"):
        with pytest.raises(ValueError, match=r"percent|number|between"):
            parse_loss(text)


def test_the_first_regions_of_a_file_are_a_topology_of_their_own() -> None:
    lossy = load_topology(NETEM / "lossy.toml")
    two = lossy.first(2)
    assert two.names == ("north", "south")
    assert sorted(two.paths) == [("north", "south"), ("south", "north")]
    assert [one.change is None for one in two.outages] == [False]
    with pytest.raises(ConfigError, match="has 3 regions, not 4"):
        lossy.first(4)


@pytest.mark.parametrize(
    ("name", "regions"), [("us-4", 4), ("world-8", 8), ("lossy", 3), ("asymmetric", 3), ("home", 4)]
)
def test_the_shipped_files_are_whole_and_plausible(name: str, regions: int) -> None:
    topology = load_topology(NETEM / f"{name}.toml")
    assert len(topology.names) == regions
    for one, other in topology.paths:
        assert 5 * MS <= rtt_ns_of(topology, one, other) <= 400 * MS
        for middle in topology.names:
            if name in ("us-4", "world-8") and middle not in (one, other):
                # No detour through a third region is much shorter than the way itself.
                assert rtt_ns_of(topology, one, middle) + rtt_ns_of(topology, middle, other) > 0.8 * rtt_ns_of(
                    topology, one, other
                )
    if name in ("us-4", "world-8"):
        assert all(2 * GBIT <= rate_of(topology, *pair).bytes_per_s <= 5 * GBIT for pair in topology.paths)
