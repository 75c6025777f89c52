"""One region of benchmarks/gray.py and lies.py: `diloco-node start` that can be given a fault from outside.

    python benchmarks/gray_region.py start --region NAME --config run.toml [-- python benchmarks/gray_region.py learn]

The fault is the text of the file `$GRAY_FAULTS/NAME`; no file, no fault. The package knows nothing of this: daemon and
learner are started by this program, which first puts itself between their parts.

| fault | what the daemon does then |
|---|---|
| drop_merged | sends no merged stripe |
| corrupt_merged | flips a bit in each merged stripe after its digest was made |
| nan_merged | reduces to NaN, with the right digest of that |
| mute | contributes in words only: no stripe of a contribution is sent |
| sum_x1000, sum_x1.5, sum_flipped, sum_biased | tells digest and norms of a merged stripe that is not the sum |
| factors, share, weights | its entries have other numbers, while it leads |
| early_end | it ends the run, while it leads |
| fsync | every fsync and fdatasync fails with EIO |
| slow_fsync | every fsync and fdatasync takes 10 s longer |
| tokens_x2, tokens_x8, tokens_x64 | the learner counts so many times the tokens of each step |
| flipped | the learner sends the negative of what it trained; with tokens: `tokens_x8,flipped` |
| against_x5 | the learner sends five times the negative of what it trained |

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
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from diloco_node.codec import kernels
from diloco_node.codec.digest import stripe_digest
from diloco_node.core.messages import ContributionStripe, MergedStripe
from diloco_node.lab.chaos.daemon_faults import install_disk
from diloco_node.lab.sim.cheats import CHEATS

SUMS: dict[str, Callable[[Any], Any]] = {
    "sum_x1000": lambda values: 1000 * values,
    "sum_x1.5": lambda values: 1.5 * values,
    "sum_flipped": np.negative,
    "sum_biased": lambda values: values + 1e-2,
}
LEADER_FAULTS = ("factors", "share", "weights", "early_end")
TOKENS = {"tokens_x2": 2, "tokens_x8": 8, "tokens_x64": 64}
GRADIENTS = {"flipped": -1.0, "against_x5": -5.0}
"""What a learner multiplies its pseudo-gradients by."""

FAULTS = ("drop_merged", "corrupt_merged", "nan_merged", "mute", "fsync", "slow_fsync")
SLOW_SYNC_S = 10.0
STATE_VARIABLE = "DILOCO_STATE"
"""A learner finds the folder of its region there, which has the region's name."""

FAULTS_VARIABLE = "GRAY_FAULTS"
BULK_VARIABLE = "GRAY_BULK"


def main(arguments: list[str]) -> int:
    """Become the region's supervisor (`start ...`), its daemon (`daemon SPEC.json`) or its learner (`learn`)."""
    if arguments[0] == "learn":
        return learn(Path(os.environ[FAULTS_VARIABLE]) / Path(os.environ[STATE_VARIABLE]).name)
    if arguments[0] == "daemon":
        from diloco_node.daemon.program import run_daemon
        from diloco_node.daemon.spec import NodeSpec

        install(Path(os.environ[FAULTS_VARIABLE]) / NodeSpec.load(Path(arguments[1])).region)
        return run_daemon(arguments[1:])
    from diloco_node.lab.demo.faulty_region import run_start

    return run_start(arguments, (str(Path(__file__).resolve()), "daemon"))


def install(file: Path) -> None:
    """Put the faults between this process's parts. `file` says which one is on."""

    fault = partial(read_fault, file)

    def is_failing() -> bool:
        """Asked before each sync; a slow one waits here."""
        now = fault()
        if now == "slow_fsync":
            time.sleep(SLOW_SYNC_S)
        return now == "fsync"

    _install_sending(fault)
    _install_reducing(fault)
    _install_leading(fault)
    install_disk(is_failing)
    _install_relays(json.loads(os.environ.get(BULK_VARIABLE, "{}")))


def read_fault(file: Path) -> str:
    """The fault that is on; empty for none."""
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        return ""


def learn(file: Path) -> int:
    """Be the built-in trainer, whose learner tells and sends something else while the fault is on."""
    from diloco_node.learner.__main__ import main as train

    install_claims(file)
    return train()


def install_claims(file: Path) -> None:
    """Have this process's learners count and send something else while the fault is on."""
    from diloco_node.learner.attach import Diloco
    from diloco_node.learner.contribution_area import ContributionArea

    step, encode = Diloco.step, ContributionArea.encode

    def words() -> list[str]:
        return read_fault(file).split(",")

    def step_or_claim(self: Diloco, *, tokens: int, **more: Any) -> None:
        step(self, tokens=tokens * max([TOKENS.get(word, 1) for word in words()]), **more)

    def encode_or_turn(self: ContributionArea, index: int, base: Any, theta: Any, rows: Any = None) -> Any:
        for factor in [GRADIENTS[word] for word in words() if word in GRADIENTS]:
            theta = (base - factor * (base - theta)).astype(np.float32)
        return encode(self, index, base, theta, rows)

    Diloco.step = step_or_claim  # type: ignore[method-assign]
    ContributionArea.encode = encode_or_turn  # type: ignore[method-assign]


def _install_leading(fault: Callable[[], str]) -> None:
    from diloco_node.daemon import node

    make = node.RegionCore

    def make_or_spoil(**facts: Any) -> Any:
        core: Any = make(**facts)
        ledger, gate = core.ledger, core.ledger._entry_gate
        honest = ledger.propose, gate.sealed
        spoiled = {}
        for name in LEADER_FAULTS[:3]:
            host: Any = SimpleNamespace()
            CHEATS[name].begin(host)
            host.spoil_core(core)
            spoiled[name] = ledger.propose, gate.sealed
            ledger.propose, gate.sealed = honest

        def propose(body: Any, *, now_ns: int) -> Any:
            if fault() == "early_end":
                core.end.doubt = lambda body, *, now_ns: ""
                core.leader.request_finish("enough")
            return spoiled.get(fault(), honest)[0](body, now_ns=now_ns)

        def seal(body: Any, **where: Any) -> Any:
            return spoiled.get(fault(), honest)[1](body, **where)

        ledger.propose, gate.sealed = propose, seal
        return core

    node.RegionCore = make_or_spoil  # type: ignore[misc, assignment]


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
        done, encoded = reduce_stripe(*given, **named)
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
        return done, encoded

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
