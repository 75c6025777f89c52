"""The torchft arm of benchmarks/peers.py: replica groups of one rank each, DiLoCo over Gloo, one fragment.

Times are those of its example train_diloco.py (30 s, and 10 s for Gloo). A majority is enough, as with us. Rank -1 is
the lighthouse.
"""

from __future__ import annotations

import socket
import sys
import time
from datetime import timedelta

from peers_learner import OUTER, Spec, Training, main
from torch import optim
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo


def light(spec: Spec) -> None:
    """Serve quorums until ended from outside."""
    least = len(spec.addresses) // 2 + 1
    server = LighthouseServer(
        bind=f"{spec.addresses[0]}:{spec.port}", min_replicas=least, join_timeout_ms=10_000, quorum_tick_ms=10
    )
    while server:
        time.sleep(3600)


def train(training: Training) -> None:
    """Synchronise by torchft's own optimizer hook: the inner step does nothing else."""
    spec, model, rank = training.spec, training.model, training.rank
    own = spec.addresses[rank]
    socket.gethostname = lambda: own  # newer versions tell it to the others, and all namespaces share one name
    port = spec.port + 1 + rank  # on loopback all stores share one interface
    store = TCPStore(own, port, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=len(spec.addresses) // 2 + 1,
        use_async_quorum=False,
        init_sync=False,  # equal seeds, equal parameters
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=f"http://{spec.addresses[0]}:{spec.port}",
        replica_id=f"peers_{rank}_",
        hostname=own,
        timeout=timedelta(seconds=30),
    )
    inner = optim.SGD(model.parameters(), lr=0.0)
    with DiLoCo(manager, [model], inner, optim.SGD(model.parameters(), **OUTER), sync_every=1):

        def merge() -> bool:
            before = manager.current_step()
            inner.step()  # no gradients: all it does is to synchronise
            return manager.current_step() == before + 1

        training.rounds(merge)


if __name__ == "__main__":
    if sys.argv[2] == "-1":
        light(Spec.read(sys.argv[1]))
    else:
        main(train)
