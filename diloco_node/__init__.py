"""diloco-node: train one model across several datacenters over ordinary internet links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from diloco_node.learner.attach import attach as attach
    from diloco_node.learner.process_signals import place as place

__all__ = ["__version__", "attach", "place"]


def __getattr__(name: str) -> Any:
    # `attach` pulls in torch, and the command line and the daemon must start without it.
    if name == "attach":
        from diloco_node.learner.attach import attach

        return attach
    if name == "place":
        from diloco_node.learner.process_signals import place

        return place
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
