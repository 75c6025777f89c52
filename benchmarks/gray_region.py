"""One region of benchmarks/gray.py: `diloco-node start` whose daemon can be given a fault from outside, while it runs.

    python benchmarks/gray_region.py start --region NAME --config run.toml

The fault is the text of the file `$GRAY_FAULTS/NAME`; no file, no fault. The package knows nothing of this: the daemon
is started by this program, which first puts itself between the daemon's parts.

| fault | what the daemon does then |
|---|---|
| drop_merged | sends no merged stripe |
| corrupt_merged | flips a bit in each merged stripe after its digest was made |
| nan_merged | reduces to NaN, with the right digest of that |
| mute | contributes in words only: no stripe of a contribution is sent |
| sum_x1000, sum_x1.5, sum_flipped, sum_biased | tells digest and norms of a merged stripe that is not the sum |
| fsync | every fsync and fdatasync fails with EIO |
| slow_fsync | every fsync and fdatasync takes 10 s longer |

With `$GRAY_BULK`, a JSON object of peer and HOST:PORT, connections for bulk are dialed there instead: a relay that can
hold them up.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from diloco_node.codec import kernels
from diloco_node.codec.digest import stripe_digest
from diloco_node.core.messages import ContributionStripe, MergedStripe
from diloco_node.lab.chaos.daemon_faults import install_disk

SUMS: dict[str, Callable[[Any], Any]] = {
    "sum_x1000": lambda values: 1000 * values,
    "sum_x1.5": lambda values: 1.5 * values,
    "sum_flipped": np.negative,
    "sum_biased": lambda values: values + 1e-2,
}
FAULTS = ("drop_merged", "corrupt_merged", "nan_merged", "mute", "fsync", "slow_fsync")
SLOW_SYNC_S = 10.0
FAULTS_VARIABLE = "GRAY_FAULTS"
BULK_VARIABLE = "GRAY_BULK"


def main(arguments: list[str]) -> int:
    """Become the region's supervisor (`start ...`), or its daemon (`daemon SPEC.json`)."""
    if arguments[0] == "daemon":
        from diloco_node.daemon.program import run_daemon
        from diloco_node.daemon.spec import NodeSpec

        install(Path(os.environ[FAULTS_VARIABLE]) / NodeSpec.load(Path(arguments[1])).region)
        return run_daemon(arguments[1:])
    from diloco_node.lab.demo.faulty_region import run_start

    return run_start(arguments, (str(Path(__file__).resolve()), "daemon"))


def install(file: Path) -> None:
    """Put the faults between this process's parts. `file` says which one is on."""

    def fault() -> str:
        try:
            return file.read_text().strip()
        except FileNotFoundError:
            return ""

    def is_failing() -> bool:
        """Asked before each sync; a slow one waits here."""
        now = fault()
        if now == "slow_fsync":
            time.sleep(SLOW_SYNC_S)
        return now == "fsync"

    _install_sending(fault)
    _install_reducing(fault)
    install_disk(is_failing)
    _install_relays(json.loads(os.environ.get(BULK_VARIABLE, "{}")))


def _install_sending(fault: Callable[[], str]) -> None:
    from diloco_node.daemon.effects.sending import Sending

    send = Sending.send

    def send_or_not(self: Sending, peer: str, header: Any, body: Any) -> None:
        now = fault()
        if isinstance(header, MergedStripe):
            if now == "drop_merged":
                return
            if now == "corrupt_merged":
                body = body.copy()
                body[body.size // 2] ^= 0x10
        elif isinstance(header, ContributionStripe) and now == "mute":
            return
        send(self, peer, header, body)

    Sending.send = send_or_not  # type: ignore[method-assign]


def _install_reducing(fault: Callable[[], str]) -> None:
    from diloco_node.daemon.effects import stripe_effects

    reduce_stripe = stripe_effects.reduce_stripe

    def reduce_or_not(*given: Any, **named: Any) -> Any:
        done, encoded, residual = reduce_stripe(*given, **named)
        spoil = SUMS.get(fault())
        if spoil is not None:
            order, blocks = given[0], given[3]
            values = np.empty(blocks.span_values(order.block_start, order.block_stop), np.float32)
            kernels.decode(blocks, encoded, values, order.block_start, order.block_stop)
            norms = kernels.encode(
                blocks, spoil(values).astype(np.float32), encoded, order.block_start, order.block_stop
            )
            done = dataclasses.replace(done, digest=stripe_digest(encoded), squared_norms=tuple(map(float, norms)))
        if fault() == "nan_merged":
            encoded = np.full_like(encoded, 0xFF)  # as a scale in float32 or bf16: NaN
            done = dataclasses.replace(done, digest=stripe_digest(encoded))
        return done, encoded, residual

    stripe_effects.reduce_stripe = reduce_or_not


def _install_relays(relays: dict[str, str]) -> None:
    from diloco_node.transport import link
    from diloco_node.wire.envelope import Lane

    dial = link.dial

    async def dial_relay(identity: Any, peer: str, address: str, lane: Lane, **named: Any) -> Any:
        where = relays.get(peer, address) if lane is Lane.BULK else address
        return await dial(identity, peer, where, lane, **named)

    link.dial = dial_relay


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
