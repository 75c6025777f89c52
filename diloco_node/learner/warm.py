"""Importing this does what a learner else does late and once: for the process that learners are forked from.

The first call of a compiled loop reads it from its cache (0.2 s of CPU time). Nothing here starts a thread or touches a
device.
"""

from __future__ import annotations

from diloco_node.codec.kernels import warm_up
from diloco_node.learner.attach import attach

__all__ = ["attach"]

warm_up()
