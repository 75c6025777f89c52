"""Setup that a seed stands for: regions, run settings, model, link speeds, disk speeds."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.merge.fragments import Manifest, TensorSpec, build_manifest
from diloco_node.core.types import CarryMode, Codec, MergeRule, RunSettings
from diloco_node.lab.sim.world import MS, SECOND, FakeLink

NAMES = ("asia-ne", "eu-west", "sa-east", "us-east", "us-west", "af-south", "au-east")
"""Not sorted on purpose: nothing may depend on the order in which regions are listed."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The fixed part of a simulated run.

    Attributes:
        regions: names, sorted. settings: as all regions agree on.
        manifest: a model of a few hundred values a fragment. layouts: of its fragments.
        is_theta_shared: Theta_0 comes from one file that all have; else each region's learner has its own.
        step_ns_min, step_ns_max: the time of one inner step, per incarnation.
        apply_lag_max: step boundaries that a learner may let pass before it takes a version.
        fsync_ns_min, fsync_ns_max: the time of one fsync on a healthy disk.
        slower: regions whose learners' steps take so many times as long.
        joiners: regions that do not found the run: they start when a test says so, or an operator (`member_changes`).
    """

    regions: tuple[str, ...]
    settings: RunSettings
    manifest: Manifest
    layouts: tuple[FragmentBlocks, ...]
    is_theta_shared: bool
    step_ns_min: int
    step_ns_max: int
    apply_lag_max: int
    fsync_ns_min: int
    fsync_ns_max: int
    slower: Mapping[str, int] = field(default_factory=dict)
    joiners: tuple[str, ...] = ()

    @property
    def founders(self) -> tuple[str, ...]:
        """The regions that found the run."""
        return tuple(name for name in self.regions if name not in self.joiners)


def draw_setup(rng: random.Random, regions: int, joiners: int = 0) -> Setup:
    """Draw the run of a seed.

    Args:
        rng: the seed's. regions: how many found the run; 0 draws 3 to 5. joiners: how many come later.
    """
    usual_count = rng.choice((3, 3, 4, 5))
    count = regions or usual_count  # drawn in any case, so that naming the drawn number changes nothing
    if not 1 <= count <= len(NAMES) - joiners:
        raise ValueError(f"from 1 to {len(NAMES)} regions can be simulated, not {count + joiners}")
    fragments = rng.choice((2, 3, 4))
    settings = RunSettings(
        fragments=fragments,
        sync_every=rng.choice((4, 6, 9)),
        overlap_steps=rng.choice((1, 2)),
        quorum_min=rng.choice((0, 0, 1)),
        rounds_in_flight_max=rng.choice((1, 2, 2)),
        merge=rng.choice((MergeRule.RDA, MergeRule.AVG)),
        codec_up=Codec.BF16,
        # The second draw is of no use, but without it each seed would be another run.
        codec_down=(rng.choice((Codec.BF16, Codec.FP32)), rng.choice((True, False)))[0],
        carry=rng.choice((CarryMode.CARRY, CarryMode.CARRY, CarryMode.CARRY, CarryMode.OVERWRITE)),
        heartbeat_ns=rng.choice((150, 200, 300)) * MS,
        election_timeout_ns=rng.choice((700, 1000)) * MS,
        ballot_deadline_min_ns=rng.choice((1000, 2000)) * MS,
        payload_versions=rng.choice((2, 4)),
        checkpoint_versions=rng.choice((1, 3)),
        summary_entries=rng.choice((12, 40, 1024)),
    )
    manifest = build_manifest(_tensors(rng, fragments), fragments)
    step_ns = rng.choice((60, 100)) * MS
    return Setup(
        regions=tuple(sorted(NAMES[: count + joiners])),
        settings=settings,
        manifest=manifest,
        layouts=tuple(FragmentBlocks(fragment.piece_sizes, Codec.BF16) for fragment in manifest.fragments),
        is_theta_shared=rng.random() < 0.5,
        step_ns_min=step_ns,
        step_ns_max=step_ns * 5 // 4,
        apply_lag_max=rng.choice((0, 0, 1, 4)),
        fsync_ns_min=MS // 2,
        fsync_ns_max=8 * MS,
        joiners=NAMES[count : count + joiners],
    )


MERGED_SHARE_MAX = 0.5
"""Part of a link that merged versions may fill: the rest is for a region that catches up."""


def rate_to_follow(setup: Setup) -> int:
    """Bytes a second of a link over which a region can follow one that merges alone, as fast as its learner steps.

    That one waits for nobody. Over a link that its merged versions fill, what another region lacks never comes.
    """
    merged_bytes = 4 * sum(layout.values for layout in setup.layouts)  # of a `codec_down` that compresses nothing
    return int(merged_bytes * SECOND / (setup.settings.sync_every * setup.step_ns_min) / MERGED_SHARE_MAX)


def hurry(setup: Setup, rng: random.Random) -> Setup:
    """The same run with shorter deadlines, more sums in its ledger, and learners that are later or not."""
    settings = setup.settings
    if rng.random() < 0.5:  # many ballots are given up after they were reduced
        settings = replace(settings, ballot_deadline_min_ns=settings.heartbeat_ns, codec_down=Codec.BF16)
    settings = replace(
        settings,
        checkpoint_versions=rng.choice((1, 1, 3)),
        summary_entries=rng.choice((4, 12, 40)),
    )
    return replace(setup, settings=settings, apply_lag_max=rng.choice((0, 4, 3 * settings.sync_every)))


def draw_links(rng: random.Random, setup: Setup) -> dict[tuple[str, str], FakeLink]:
    """Links between all pairs; the two directions of a pair differ."""
    links = {}
    for source in setup.regions:
        for target in setup.regions:
            if source != target:
                links[source, target] = FakeLink(
                    delay_ns=rng.randint(5, 60) * MS,
                    jitter_ns=rng.choice((0, 5, 40)) * MS,
                    loss=rng.choice((0.0, 0.0, 0.01)),
                    duplicate=rng.choice((0.0, 0.02)),
                    rate_bytes_per_s=rng.choice((20_000, 200_000, 2_000_000)),
                )
    return links


def _tensors(rng: random.Random, fragments: int) -> list[TensorSpec]:
    """Enough tensors for the fragments: odd sizes, so that the last block of a piece is short."""
    specs = []
    for index in range(2 * fragments):
        rule = MergeRule.AVG if index == 0 else MergeRule.RDA
        specs.append(TensorSpec(f"layer{index:02d}.weight", (rng.choice((257, 300, 511)),), rule))
    return specs


HEAL_DEADLINE_NS = 120 * SECOND
"""Virtual time after healing within which every region must have caught up and new rounds must have committed."""
