"""Our arm of benchmarks/peers.py: the learner of a region, started by `diloco-node start`."""

from __future__ import annotations

from peers_learner import Training, main

import diloco_node


def train(training: Training) -> None:
    """Step until told to stop; the parameters move once after each applied version."""
    seen = None
    # No peer writes checkpoints.
    with diloco_node.attach(training.model, checkpoint_every_s=0) as diloco:
        while not diloco.should_stop:
            training.step()
            training.stand(lambda: diloco.step(tokens=1, loss=0.0))
            if seen != diloco.versions:
                seen = diloco.versions
                training.move()
                training.log("round", number=max(seen))


if __name__ == "__main__":
    main(train)
