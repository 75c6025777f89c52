"""What one region sends, shaped at its own device: the commands, by hand, on kernels with and without each part."""

from dataclasses import replace

import pytest

from diloco_node.lab.wan.topology import PathChange, parse_topology
from diloco_node.lab.wan.uplink import Kernel, Uplink, shortcomings

TEXT = """
[wan]
queue = "60ms"
[regions.a]
egress = "2Gbit/s"
ingress = "3Gbit/s"
[regions.b]
egress = "1Gbit/s"
ingress = "8Mbit/s"
[regions.c]
egress = "1Gbit/s"
[[links]]
between = ["a", "b"]
rtt = "41ms"
jitter = "2ms"
loss = "0.1%"
[[links]]
from = "a"
to = "c"
delay = "30ms"
rate = "100Mbit/s"
[[links]]
from = "c"
to = "a"
delay = "7ms"
[[links]]
between = ["b", "c"]
rtt = "10ms"
"""
TOPOLOGY = parse_topology(TEXT, name="t")
WHOLE = Kernel(netem=True, htb=True, tbf=True, redirect=True, ifb=True)


def uplink(kernel: Kernel) -> Uplink:
    # Given in another order than the file's: it must not matter.
    return Uplink(TOPOLOGY, "a", {"c": "10.0.0.3", "b": "10.0.0.2"}, "eth1", kernel)


def test_each_destination_has_a_class_a_delay_a_queue_and_a_filter() -> None:
    # 2 Gbit/s: 2 ms are 500 kB, 60 ms are 15 MB; 100 Mbit/s: 2 ms are 25 kB, below the least of 128 KiB.
    assert uplink(WHOLE).lines() == [
        "qdisc add dev eth1 root handle 1: htb",
        "class add dev eth1 parent 1: classid 1:1 htb rate 2000000000bit burst 500000 cburst 500000 quantum 65536",
        "class add dev eth1 parent 1:1 classid 1:11 htb rate 8000000bit ceil 8000000bit burst 131072 cburst 131072 "
        "quantum 65536",
        "qdisc add dev eth1 parent 1:11 handle 11: netem limit 1000000 delay 20500us 2000us loss 0.100000%",
        "qdisc add dev eth1 parent 11:1 bfifo limit 15000000",
        "filter add dev eth1 parent 1: protocol ip prio 1 u32 match ip dst 10.0.0.2/32 flowid 1:11",
        "class add dev eth1 parent 1:1 classid 1:12 htb rate 100000000bit ceil 100000000bit burst 131072 cburst 131072 "
        "quantum 65536",
        "qdisc add dev eth1 parent 1:12 handle 12: netem limit 1000000 delay 30000us loss 0.000000%",
        "qdisc add dev eth1 parent 12:1 bfifo limit 15000000",
        "filter add dev eth1 parent 1: protocol ip prio 1 u32 match ip dst 10.0.0.3/32 flowid 1:12",
    ]


def test_what_comes_in_is_held_to_the_ingress_rate_on_a_device_of_its_own() -> None:
    assert uplink(WHOLE).ingress_lines() == [
        "qdisc add dev wan-in root tbf rate 3000000000bit burst 750000 limit 22500000",
        "qdisc add dev eth1 handle ffff: ingress",
        "filter add dev eth1 parent ffff: protocol ip u32 match u32 0 0 action mirred egress redirect dev wan-in",
    ]


def test_shares_of_the_rate_never_add_up_to_more_than_it() -> None:
    wide = parse_topology(TEXT.replace("8Mbit/s", "1Gbit/s").replace('rate = "100Mbit/s"', ""), name="t")
    lines = Uplink(wide, "a", {"b": "10.0.0.2", "c": "10.0.0.3"}, "eth1", WHOLE).lines()
    shares = [
        int(line.split(" rate ")[1].split("bit")[0])
        for line in lines
        if "classid 1:1 " not in line and " rate " in line
    ]
    assert shares == [1_000_000_000, 1_000_000_000]


def test_a_path_that_degrades_changes_its_class_and_its_delay() -> None:
    path = PathChange(delay_ns=90 * 10**6, loss_ppm=50_000).apply(TOPOLOGY.paths["a", "c"])
    assert uplink(WHOLE).path_lines("c", path) == [
        "class change dev eth1 parent 1:1 classid 1:12 htb rate 100000000bit ceil 100000000bit burst 131072 "
        "cburst 131072 quantum 65536",
        "qdisc change dev eth1 parent 1:12 handle 12: netem limit 1000000 delay 90000us loss 5.000000%",
    ]


def test_a_whole_kernel_falls_short_of_nothing() -> None:
    assert shortcomings(WHOLE) == []


def test_without_netem_rates_are_kept_and_it_is_said_that_delay_is_not() -> None:
    kernel = replace(WHOLE, netem=False)
    lines = uplink(kernel).lines()
    assert len([line for line in lines if line.startswith("class add")]) == 3
    assert "qdisc add dev eth1 parent 1:11 handle 11: bfifo limit 15000000" in lines
    assert not any("netem" in line for line in lines)
    assert not any("netem" in line for line in uplink(kernel).path_lines("c", TOPOLOGY.paths["a", "c"]))
    said = shortcomings(kernel)
    assert len(said) == 1
    assert "DELAY, JITTER AND LOSS ARE NOT EMULATED" in said[0]
    assert "sch_netem" in said[0]


def test_without_htb_the_region_s_rate_is_kept_and_the_rest_is_said() -> None:
    kernel = replace(WHOLE, htb=False)
    assert uplink(kernel).lines() == ["qdisc add dev eth1 root tbf rate 2000000000bit burst 500000 limit 15000000"]
    assert uplink(kernel).path_lines("c", TOPOLOGY.paths["a", "c"]) == []
    assert [line.split(" NOT ")[0] for line in shortcomings(kernel)] == [
        "PER-PAIR RATE IS",
        "DELAY, JITTER AND LOSS ARE",
    ]


@pytest.mark.parametrize("lacking", ["tbf", "redirect", "ifb"])
def test_without_a_part_of_it_ingress_is_left_alone_and_that_is_said(lacking: str) -> None:
    kernel = replace(WHOLE, **{lacking: False})
    assert uplink(kernel).ingress_lines() == []
    assert [line.split(" NOT ")[0] for line in shortcomings(kernel)] == ["INGRESS RATE IS"]


def test_a_kernel_with_nothing_gets_no_commands() -> None:
    kernel = Kernel(netem=False, htb=False, tbf=False, redirect=False, ifb=False)
    assert uplink(kernel).lines() == uplink(kernel).ingress_lines() == []
    assert len(shortcomings(kernel)) == 3
