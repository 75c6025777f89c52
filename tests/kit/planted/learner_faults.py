"""How a fault is planted into learners."""

from collections.abc import Callable
from typing import Any

from diloco_node.lab.sim.host import Host


def spoil_learners(host: Host, spoil: Callable[[Any], None]) -> None:
    """Change every learner of a region right after it has started."""
    start = host.start_learner

    def start_spoiled() -> None:
        before = host.learner
        start()
        if host.learner is not before and host.learner is not None:
            spoil(host.learner)

    host.start_learner = start_spoiled  # type: ignore[method-assign]
