"""The hivemind arm of benchmarks/peers.py: its averager of the whole outer gradient, float32, found over its DHT.

A group is all regions, and its own time for that is 5 s; a round that fails is tried again by the next call.
"""

from __future__ import annotations

import time
from pathlib import Path

import hivemind
from hivemind.averaging import DecentralizedAverager
from peers_learner import Outer, Training, main

FIRST = "first-peer"
ROUND_S_MAX = 30.0
"""As torchft's limit."""


def train(training: Training) -> None:
    """Join the DHT, then average."""
    spec, rank = training.spec, training.rank
    file = Path(spec.folder) / FIRST
    while rank and not file.exists():
        time.sleep(0.1)
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{spec.addresses[rank]}/tcp/{spec.port + rank}"],
        initial_peers=file.read_text().split() if rank else [],
        start=True,
    )
    if not rank:
        partial = file.with_suffix(".tmp")
        partial.write_text("\n".join(map(str, dht.get_visible_maddrs())))
        partial.rename(file)
    outer = Outer(training.model)
    regions = len(spec.addresses)
    averager = DecentralizedAverager(
        [outer.delta()], dht, prefix="peers", target_group_size=regions, min_group_size=regions, start=True
    )

    def merge() -> bool:
        with averager.get_tensors() as tensors:
            tensors[0].copy_(outer.delta())
        try:
            if averager.step(timeout=ROUND_S_MAX) is None:
                return False
        except Exception as error:  # noqa: BLE001 - it raises what its parts raise
            print(f"{type(error).__name__}: {error}", flush=True)
            return False
        with averager.get_tensors() as tensors:
            outer.step(tensors[0].clone())
        return True

    training.rounds(merge)


if __name__ == "__main__":
    main(train)
