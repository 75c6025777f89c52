"""The tc back-end: the commands it gives, by hand, and how it says that the kernel lacks a part."""

import os

import pytest

from diloco_node.lab.wan import netem
from diloco_node.lab.wan.namespaces import PROBE, existing, places
from diloco_node.lab.wan.netem import (
    core_commands,
    downlink_commands,
    path_commands,
    probe_netem,
    region_commands,
    uplink_commands,
)
from diloco_node.lab.wan.topology import Path, parse_topology

TEXT = """
[regions.a]
egress = "2Gbit/s"
[regions.b]
egress = "1Gbit/s"
ingress = "8Mbit/s"
[regions.c]
egress = "1Gbit/s"
[default_link]
rtt = "41ms"
jitter = "2ms"
loss = "0.1%"
"""
TOPOLOGY = parse_topology(TEXT, name="t")
PLACES = places("t", TOPOLOGY.names)
MS = 10**6


def test_the_uplink_is_a_bucket_of_the_region_s_rate_with_the_queue_in_bytes() -> None:
    # 2 Gbit/s: 2 ms are 500 kB, 50 ms are 12.5 MB.
    assert uplink_commands(TOPOLOGY, "a") == [
        "qdisc add dev wan0 root tbf rate 2000000000bit burst 500000 limit 12500000"
    ]


def test_the_downlink_has_a_class_per_source_whose_shares_add_up_to_the_rate() -> None:
    lines = [line for line in downlink_commands(TOPOLOGY, PLACES) if " dev to1 " in line]
    assert lines == [
        "qdisc add dev to1 root handle 1: htb",
        "class add dev to1 parent 1: classid 1:1 htb rate 8000000bit burst 131072 cburst 131072 quantum 65536",
        "class add dev to1 parent 1:1 classid 1:10 htb rate 4000000bit ceil 8000000bit burst 131072 cburst 131072 "
        "quantum 65536",
        "qdisc add dev to1 parent 1:10 handle 10: netem limit 1000000",
        "qdisc add dev to1 parent 10:1 bfifo limit 131072",
        "filter add dev to1 parent 1: protocol ip prio 1 u32 match ip src 10.77.0.1/32 flowid 1:10",
        "class add dev to1 parent 1:1 classid 1:12 htb rate 4000000bit ceil 8000000bit burst 131072 cburst 131072 "
        "quantum 65536",
        "qdisc add dev to1 parent 1:12 handle 12: netem limit 1000000",
        "qdisc add dev to1 parent 12:1 bfifo limit 131072",
        "filter add dev to1 parent 1: protocol ip prio 1 u32 match ip src 10.77.0.3/32 flowid 1:12",
    ]


def test_a_path_is_a_netem_at_its_target_and_a_cut_is_full_loss() -> None:
    path = TOPOLOGY.paths["a", "b"]
    first, second = path_commands(TOPOLOGY, TOPOLOGY.names, ("a", "b"), path)
    assert first == (
        "qdisc change dev to1 parent 1:10 handle 10: netem limit 1000000 delay 20500us 2000us loss 0.100000%"
    )
    assert "rate 4000000bit ceil 8000000bit" in second
    cut, _ = path_commands(TOPOLOGY, TOPOLOGY.names, ("a", "b"), None)
    assert cut.endswith("delay 20500us 2000us loss 100.000000%")


def test_a_pair_s_own_rate_is_the_ceiling_of_its_class() -> None:
    rate = parse_topology(TEXT + 'rate = "1Mbit/s"\n', name="t").paths["a", "b"].rate
    _, second = path_commands(TOPOLOGY, TOPOLOGY.names, ("a", "b"), Path(20 * MS, rate=rate))
    assert "classid 1:10 htb rate 1000000bit ceil 1000000bit" in second


def test_every_region_is_tied_to_the_middle_and_knows_the_way_to_the_others() -> None:
    assert core_commands(PLACES)[:4] == [
        "link add to0 type veth peer name wan0 netns diloco-t-a",
        "addr add 169.254.77.1/32 dev to0",
        "link set to0 up",
        "route add 10.77.0.1/32 dev to0",
    ]
    lines = region_commands(PLACES[0])
    assert "route add 10.77.0.0/24 via 169.254.77.1 dev wan0 onlink src 10.77.0.1" in lines


@pytest.mark.system
@pytest.mark.skipif(
    os.geteuid() != 0, reason="network namespaces need root: nothing of the WAN is tested on this machine"
)
def test_the_probe_says_what_is_missing_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of this process only: others may emulate something here too.
    ours = f"-{PROBE}{os.getpid() % 10**6}-"
    fault = probe_netem()
    assert fault == "" or ": " in fault
    monkeypatch.setattr(netem, "_PARTS", (("qdisc of the moon", "qdisc add dev wan1 root moon"),))
    assert probe_netem().startswith("qdisc of the moon: ")
    assert not [name for name in existing() if ours in name]
