"""A replica group of the torchft arm of benchmarks/storm_peers.py: one process, DiLoCo with a manager over Gloo.

    python storm_torchft.py SPEC.json RANK

After a death it comes back with fresh parameters, and heals from a living group at its first synchronisation.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

from storm_learner import StormLearner, StormSpec
from torch import nn, optim
from torchft import Manager, ProcessGroupGloo
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.local_sgd import DiLoCo


def main() -> None:
    """Train until killed."""
    spec, rank = StormSpec.read(sys.argv[1]), int(sys.argv[2])
    learner = StormLearner(spec, rank)
    model, inner = learner.model, learner.optimizer
    parts = model.get_submodule("model")
    fragments = [
        nn.ModuleList([parts.get_submodule("embed_tokens")]),
        *(nn.ModuleList([layer]) for layer in parts.get_submodule("layers").children()),
        nn.ModuleList([parts.get_submodule("norm"), model.get_submodule("lm_head")]),
    ]
    sizes = [sum(one.numel() for one in fragment.parameters()) for fragment in fragments]
    outer = [
        optim.SGD(fragment.parameters(), lr=spec.outer_lr, momentum=spec.outer_momentum, nesterov=True)
        for fragment in fragments
    ]
    healed_at: int | None = None  # the run's outer step that was taken over from a donor in this inner step

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "inner": inner.state_dict(), "number": learner.number}

    def load(state: dict[str, Any]) -> None:
        nonlocal healed_at
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])
        learner.number = state["number"]
        healed_at = manager.current_step()

    short = timedelta(seconds=spec.gloo_timeout_s)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=short),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=spec.min_replicas,
        use_async_quorum=False,  # DiLoCo asks for that
        init_sync=False,  # equal seeds, equal parameters
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=spec.stores[rank],
        lighthouse_addr=spec.lighthouse,
        replica_id=f"storm_{rank}",
        hostname="127.0.0.1",
        timeout=timedelta(seconds=spec.timeout_s),
        checkpoint_transport=HTTPTransport(timeout=short, num_chunks=0),
    )
    tokens_per_step = spec.batch * spec.context
    period = spec.sync_every // len(fragments)
    made = 0
    pending = [0] * len(fragments)  # steps of this process that no outer step has, by fragment
    with DiLoCo(manager, fragments, inner, outer, sync_every=spec.sync_every):
        while True:
            before, healed_at = manager.current_step(), None
            learner.step(model.loss)
            made += 1
            pending = [steps + 1 for steps in pending]
            if made == 1:
                learner.log("trains")
            if made % period:
                continue
            if healed_at is not None:
                # Its parameters are the donor's: what it contributed now, the donor contributed too.
                before, pending = healed_at, [0] * len(fragments)
            fragment = before % len(fragments)
            is_committed = manager.current_step() == before + 1
            tokens = pending[fragment] * tokens_per_step * sizes[fragment] / sum(sizes) if is_committed else 0.0
            pending[fragment] = 0
            learner.log(
                "commit" if is_committed else "refused",
                step=manager.current_step(),
                quorum=manager._quorum_id,
                participants=manager.num_participants(),
                has_healed=healed_at is not None,
                tokens=tokens,
            )


if __name__ == "__main__":
    main()
