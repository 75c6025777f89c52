"""The table of bounds for every field of every message: what the core says (`core.bounds`), and what the wire adds."""

from __future__ import annotations

from typing import Final

from diloco_node.core.bounds import (
    CORE_BOUNDS,
    DIGEST_TEXT_BYTES,
    FRAGMENTS,
    INDEX,
    INDEX_MAX,
    LISTING_BYTES_MAX,
    PIECES,
    REGIONS,
    STEP_MAX,
)
from diloco_node.core.shapes import Bound, Items, Octets, Real, Text, Whole

COUNT_MAX: Final = 2**63 - 1
"""Bound of numbers that were drawn at random, and of a kernel's counters."""

RATE_FREE_MAX: Final = 2**62
"""The share of who wants all that there is (`transport.pacing.grants`)."""

ANSWER_BYTES: Final = 4096
"""Bound of a string on the learner link."""

SETTINGS: Final = 64
"""Settings in a hello; there are some 25."""

SETTING_BYTES: Final = 128
"""Bound of a setting, "name=value"."""

COUNTED: Final = Whole(0, COUNT_MAX)
KERNEL_COUNTED: Final = Whole(-1, COUNT_MAX)
"""-1 where the kernel does not tell."""

NUMBER: Final = Real()

BOUNDS: Final[dict[str, Bound]] = {
    **CORE_BOUNDS,
    # The link
    "protocol_version": Whole(0, 127),
    "founding_digest": Text(DIGEST_TEXT_BYTES),
    "instance_id": Octets((16,)),
    "dial": INDEX,
    "connection": Whole(0, 7),
    "settings": Items(SETTINGS, Text(SETTING_BYTES)),
    "RunShown.settings": Items(SETTINGS, Text(ANSWER_BYTES)),
    "RunShown.members": Items(REGIONS),
    "model": Octets((), LISTING_BYTES_MAX),
    "IngressGranted.bytes_per_s": Whole(0, RATE_FREE_MAX),
    "IngressDemand.bytes_per_s": Whole(0, RATE_FREE_MAX),
    # Measuring
    "measurement": COUNTED,
    "sent_bytes": KERNEL_COUNTED,
    "retransmitted_bytes": KERNEL_COUNTED,
    "wire_bytes": KERNEL_COUNTED,
    "bytes_max": COUNTED,
    "mean": COUNTED,
    "median": COUNTED,
    "p10": COUNTED,
    "p90": COUNTED,
    "answered": COUNTED,
    "unanswered": COUNTED,
    "LinkMeasured.bytes_per_s": COUNTED,
    # The learner link
    "protocol": Whole(0, 65_535),
    "pid": Whole(0, 2**32),
    "tensors": Items(PIECES),
    "name": Text(ANSWER_BYTES),
    "shape": Items(8, Whole(0, 2**40)),
    "snapshots": Items(FRAGMENTS, Whole(-1, INDEX_MAX)),
    "included_snapshot": Whole(-1, INDEX_MAX),
    "slot": Whole(-1, INDEX_MAX),
    "slots": Items(FRAGMENTS, Whole(-1, INDEX_MAX)),
    "loss": NUMBER,
    "val_loss": NUMBER,
    "val_loss_global": NUMBER,
    "val_step": Whole(0, STEP_MAX),
    "carry_factor": Real(0.0, 1.0),
    "carried_steps": Whole(0, STEP_MAX),
    "global_step": Whole(0, STEP_MAX),
    "run_part": Real(0.0, 1.0),
    "region_index": Whole(0, REGIONS - 1),
    "fragments": Whole(1, FRAGMENTS),
    "sync_every": Whole(1, STEP_MAX),
    "carry_steps_limit": Whole(0, STEP_MAX),
    "state_dir": Text(ANSWER_BYTES),
    "Failed.reason": Text(ANSWER_BYTES),
    "Warned.text": Text(ANSWER_BYTES),
    "Refuse.reason": Text(ANSWER_BYTES),
    "Stop.reason": Text(ANSWER_BYTES),
}
