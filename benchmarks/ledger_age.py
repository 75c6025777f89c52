"""How long a restart takes, and how much memory it needs, by the age of the run.

A ledger of many rounds is made through the real core of one region and the real files, first with the ledger summed up
as the run goes, then without. A fresh process then loads each folder, as a daemon does at its start, and applies what
the ledger says in the slices in which the daemon would.

    python benchmarks/ledger_age.py --rounds 100000 [--json]

A region alone is its own majority, so nothing waits for a network. States are small: what is measured is the ledger.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from diloco_node.codec.digest import fragment_digest, payload_digest, stripe_digest
from diloco_node.core import events as ev
from diloco_node.core.merge.fragments import TensorSpec, build_manifest
from diloco_node.core.merge.stripes import block_count
from diloco_node.core.merge.weights import weight
from diloco_node.core.region import RegionCore
from diloco_node.core.types import Ballot, Contribution, Member, MergeRule, RoundBody, RunSettings, Stripe
from diloco_node.state_names import LEDGER_NAME
from diloco_node.storage import durable
from diloco_node.storage.store import RegionStore

FRAGMENTS: Final = 24
VALUES: Final = 300
NEVER: Final = 1 << 62
"""A ledger that is summed up so rarely is never summed up."""

SETTINGS: Final = RunSettings(fragments=FRAGMENTS)
FILES: Final = 2 * FRAGMENTS * (SETTINGS.payload_versions + SETTINGS.checkpoint_versions)
"""Payloads of so many rounds are written: more than are there at the end of a run."""

MANIFEST: Final = build_manifest(
    [TensorSpec(f"layer{index:02d}.weight", (VALUES,), MergeRule.RDA) for index in range(FRAGMENTS)], FRAGMENTS
)
STATE: Final = np.zeros(VALUES, np.float32)
DIGEST: Final = fragment_digest(STATE, STATE)
PAYLOAD: Final = bytes(VALUES)


class Region:
    """One region's core and folder. Each effect is carried out at once; a round is a payload on disk and an entry."""

    def __init__(self, folder: Path, summary_entries: int) -> None:
        self.store = RegionStore(folder)
        started = time.perf_counter()
        recovered = self.store.load(FRAGMENTS)
        self.core = RegionCore(
            region="eu",
            regions=("eu",),
            run_id="age",
            settings_digest="s",
            manifest=MANIFEST,
            settings=replace(SETTINGS, summary_entries=summary_entries),
            recovery=recovered,
            seed=1,
            secret=bytes(32),
            now_ns=0,
        )
        self.load_s = time.perf_counter() - started
        self.now_ns = 0
        self.slowest_s = 0.0

    def give(self, event: ev.Event) -> None:
        """Hand the core a fact, and carry out what it wants."""
        queue = [event]
        while queue:
            started = time.perf_counter()
            effects = self.core.handle(queue.pop(0), now_ns=self.now_ns)
            self.slowest_s = max(self.slowest_s, time.perf_counter() - started)
            for effect in effects:
                queue += self._perform(effect)

    def _perform(self, effect: ev.Effect) -> list[ev.Event]:
        match effect:
            case ev.PersistLedger():
                self.store.persist(effect.term, effect.voted_for, effect.truncate_from, effect.entries, effect.base)
                return [ev.LedgerPersisted(effect.token)]
            case ev.AdoptState():
                return self._at(effect.fragment, effect.version)
            case ev.ApplyVersion():
                fragment, version = effect.body.fragment, effect.body.version
                found = self._at(fragment, version)
                if version % SETTINGS.checkpoint_versions == 0:
                    self.store.store_state(fragment, version, STATE, STATE, DIGEST)
                    found.append(ev.CheckpointWritten(fragment, version, DIGEST))
                return found
            case ev.PruneFiles():
                self.store.prune(effect.fragment, effect.keep_from_version)
        return []

    def _at(self, fragment: int, version: int) -> list[ev.Event]:
        return [ev.VersionApplied(fragment, version), ev.DigestComputed(fragment, version, DIGEST)]

    def pass_time(self) -> None:
        """Let the core's next timer fire."""
        self.now_ns = max(self.now_ns + 1, self.core.wake_at_ns)
        self.give(ev.TimerFired())

    def begin(self) -> None:
        """Found the run."""
        for fragment in range(FRAGMENTS):
            self.store.store_state(fragment, 0, STATE, STATE, DIGEST)
        self.give(ev.InitialStateStored((DIGEST,) * FRAGMENTS))
        while self.core.history.genesis is None:
            self.pass_time()

    def hold_round(self, number: int, *, has_file: bool) -> None:
        """Commit one round of the region's learner.

        Args:
            has_file: its payload is written; those that are pruned before the end need no file.
        """
        fragment, version = number % FRAGMENTS, number // FRAGMENTS + 1
        digest = payload_digest([stripe_digest(PAYLOAD)])
        steps = (24 * (version - 1), 24 * version)
        member = Member(
            Contribution("eu", 1, fragment, version - 1, version, *steps, 24 * 4096, (1.0,)), weight(24 * 4096, 24)
        )
        stripes = (Stripe("eu", 0, block_count(MANIFEST.fragments[fragment])),)
        ballot = Ballot(1, number + 1)
        body = RoundBody(fragment, version, ballot, (member,), 1.0, (1.0,), stripes, digest, squared_norms=(1.0,))
        if has_file:
            self.store.store_payload(fragment, version, digest, [PAYLOAD])
        self.give(ev.PayloadStored(fragment, version, digest))
        self.core.leader.proposals.append(body)
        # One heartbeat each few rounds: snapshots and sums are put into the ledger then.
        if number % FRAGMENTS == 0:
            self.pass_time()
        else:
            self.give(ev.LinkChanged("nobody", is_up=False))


def make(folder: Path, rounds: int, summary_entries: int) -> float:
    """Make a ledger of this age; returns the seconds that it took."""
    started = time.perf_counter()
    region = Region(folder, summary_entries)
    region.begin()
    for number in range(rounds):
        region.hold_round(number, has_file=number >= rounds - FILES)
    region.store.close()
    return time.perf_counter() - started


def restart(folder: Path, summary_entries: int) -> dict[str, Any]:
    """Start from the folder until all is applied that is in the ledger."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, cpu_started = time.perf_counter(), time.process_time()
    region = Region(folder, summary_entries)
    last = region.core.ledger.last_index
    slices = 0
    while region.core.versions.applied_index() < last:
        region.pass_time()
        slices += 1
    took, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    region.store.close()
    return {
        "entries": last,
        "entries_kept": len(region.core.ledger.entries),
        "ledger_bytes": (folder / LEDGER_NAME).stat().st_size,
        "load_s": round(region.load_s, 3),
        "restart_s": round(took, 3),
        "restart_cpu_s": round(cpu_s, 3),
        "slices": slices,
        "slowest_slice_s": round(region.slowest_s, 4),
        "memory_mb": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1),
    }


def measure(rounds: int, *, is_summed_up: bool) -> dict[str, Any]:
    """Make a ledger, and start from it in a process of its own."""
    summary_entries = SETTINGS.summary_entries if is_summed_up else NEVER
    with tempfile.TemporaryDirectory(prefix="diloco-age-") as name:
        folder = Path(name) / "eu"
        made_s = make(folder, rounds, summary_entries)
        command = [sys.executable, __file__, "--restart", str(folder), "--summary-entries", str(summary_entries)]
        found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"rounds": rounds, "summed_up": is_summed_up, "made_s": round(made_s, 1), **found}


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--summed-up-only", action="store_true", help="leave out the ledger that is never summed up")
    parser.add_argument("--restart", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--summary-entries", type=int, default=SETTINGS.summary_entries, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.restart is not None:
        print(json.dumps(restart(options.restart, options.summary_entries)))
        return
    # The disk's share of making a ledger is not what is measured.
    durable.os.fsync = durable.os.fdatasync = lambda _: None
    for is_summed_up in (True,) if options.summed_up_only else (True, False):
        found = measure(options.rounds, is_summed_up=is_summed_up)
        print(json.dumps(found) if options.json else "\n".join(f"{name:18} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
