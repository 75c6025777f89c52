"""The bounds of what the core says and keeps: messages, bulk headers and entries of the ledger (`docs/protocol.md`).

A bound is as wide as an honest region may ever need, and no wider. Whether a value inside it makes sense now is a
question of meaning, which the core asks where it uses the field. A field without a bound can't be sent or kept.
"""

from __future__ import annotations

from typing import Final

from diloco_node.core.data_shards import ROWS_MAX, SHARDS
from diloco_node.core.shapes import Bound, Items, Octets, Real, Text, Whole

REGIONS: Final = 64
FRAGMENTS: Final = 1024
PIECES: Final = 65_536
"""Tensors of one fragment: it may hold each of as many tensors as a model may have."""

STRIPES: Final = 96
"""Stripes of a round: one for each region, and 32 more of a large fragment."""

VERSION_MAX: Final = 1 << 40
"""At ten versions a second of one fragment: 3,500 years. Versions are multiplied and shifted nowhere."""

STEP_MAX: Final = 1 << 48
"""At a thousand steps a second: 9,000 years."""

TOKENS_MAX: Final = 1 << 56
"""Tokens of one incarnation: 7e16, a thousand times the tokens of the largest runs. Sums of a run stay below 2^63."""

INCARNATION_MAX: Final = 1 << 40
INDEX_MAX: Final = 1 << 48
"""Numbers of entries, terms, messages, ballots and snapshots: each is counted up by one."""

SPAN_NS_MAX: Final = 1 << 56
"""Two years: a process that was stopped for long reports long spans honestly."""

RATE_MAX: Final = 1 << 44
"""Bytes per second: 140 Tbit/s, above every ceiling that a run.toml may set."""

BLOCKS_MAX: Final = (1 << 32) + PIECES
"""Blocks of 256 values of the largest model, the last one of each piece not full."""

SYNC_EVERY_MAX: Final = 100_000
POSITIVE_MIN: Final = 5e-324
BELOW_ONE: Final = 1.0 - 2.0**-53
FLOAT32_MAX: Final = 3.4028234663852886e38
HASH_BYTES: Final = 32
SUMMARY_BYTES_MAX: Final = 3 << 20
"""Longest summary of a ledger, below the limit of a control message. 64 regions, 100 fragments: about 0.5 MB."""

LISTING_BYTES_MAX: Final = 60_000
"""Some thousands of tensors, whose names are much alike, or two thousand frozen ones; of more regions only say that
they differ (`wire.tensor_listing`, `wire.frozen_listing`)."""

REVOKED: Final = 1024
"""Certificates of a run. Another authority revokes all at once."""

DISK_BYTES: Final = 16
DIGEST_TEXT_BYTES: Final = 128
"""A digest as hexadecimal text, with room for a longer one."""

KIND_BYTES: Final = 16
"""Longest name of a kind of member, or of a region's part in a ballot."""

ADDRESS_BYTES: Final = 264
"""A host's name of 253 bytes, or an IPv6 address in brackets, and a port."""

SIGNATURE_BYTES: Final = 144
"""Longest signature of an authority: ECDSA on P-521 takes 139 in DER."""

RUN_ID_BYTES: Final = 256
REASON_BYTES: Final = 1024

INDEX: Final = Whole(0, INDEX_MAX)
VERSION: Final = Whole(0, VERSION_MAX)
REACHED: Final = Whole(-1, VERSION_MAX)
"""A version that was reached: -1 before genesis."""

STEP: Final = Whole(0, STEP_MAX)
SUM: Final = Whole(0, (1 << 63) - 1)
"""Largest sum of steps or tokens of many incarnations."""

TOKENS: Final = Whole(0, TOKENS_MAX)
NORM: Final = Real(0.0)
COEFFICIENT: Final = Real(0.0, FLOAT32_MAX)
PROJECTION: Final = Real(-(2.0**110), 2.0**110)
"""The longest contribution, 2^100, with the same sign in each of a window's 4,096 values, and room."""

WINDOWS: Final = 2 * REGIONS
HASH: Final = Octets((HASH_BYTES,))
NAMES: Final = Items(REGIONS, is_set=True)

CORE_BOUNDS: Final[dict[str, Bound]] = {
    # Who and where
    "regions": NAMES,
    "members": NAMES,
    "hears": NAMES,
    "run_id": Text(RUN_ID_BYTES),
    "manifest_digest": Text(DIGEST_TEXT_BYTES),
    "settings_digest": Text(DIGEST_TEXT_BYTES),
    "reason": Text(REASON_BYTES),
    # The ledger
    "index": Whole(1, INDEX_MAX),
    "term": INDEX,
    "last_index": INDEX,
    "end_index": INDEX,
    "life": Whole(0, (1 << 63) - 1),
    "last_term": INDEX,
    "previous_index": INDEX,
    "commit_index": INDEX,
    "durable_index": INDEX,
    "applied_index": INDEX,
    "sequence": INDEX,
    "previous": HASH,
    "previous_hash": HASH,
    "hash": HASH,
    "digest": HASH,
    "durable_hash": HASH,
    "payload_digest": HASH,
    "entries": Items(64),
    "disk": Octets((0, DISK_BYTES)),
    "disks": Items(REGIONS, Octets((DISK_BYTES,))),
    "listing": Octets((), most=LISTING_BYTES_MAX),
    "certificate": HASH,
    "kind": Text(KIND_BYTES),
    "address": Text(ADDRESS_BYTES),
    "changes": INDEX,
    "signature": Octets((), most=SIGNATURE_BYTES),
    # Fragments and versions
    "fragment": Whole(0, FRAGMENTS - 1),
    "version": VERSION,
    "versions": Items(FRAGMENTS, VERSION),
    "base_version": REACHED,
    "positions": Items(FRAGMENTS),
    "fragment_digests": Items(FRAGMENTS, HASH),
    "digests": Items(FRAGMENTS),
    # Rounds
    "number": INDEX,
    "stripe": Whole(0, STRIPES - 1),
    "stripes": Items(STRIPES),
    "reused": Items(REGIONS * STRIPES),
    "receipts": Items(REGIONS),
    "block_start": Whole(0, BLOCKS_MAX),
    "block_stop": Whole(0, BLOCKS_MAX, above="block_start"),
    "contributions": Items(REGIONS),
    "coefficients": Items(REGIONS, Items(PIECES, COEFFICIENT)),
    "squared_norms": Items(PIECES, NORM),
    "contribution_norms": Items(REGIONS, Items(PIECES, NORM)),
    "factors": Items(PIECES, COEFFICIENT),
    "weight": COEFFICIENT,
    "share": Real(0.0, 1.0),
    "left_out": Items(2 * REGIONS),
    # Of the data
    "rows": Items(1 + 3 * SHARDS, Whole(0, ROWS_MAX)),
    "shards": Items(SHARDS, Whole(0, SHARDS - 1)),
    "starts": Items(SHARDS, Whole(-1, ROWS_MAX)),
    "part": Text(KIND_BYTES),
    # Learners
    "incarnation": Whole(0, INCARNATION_MAX),
    "snapshot": INDEX,
    "step": STEP,
    "step_from": STEP,
    "step_to": Whole(0, STEP_MAX, since="step_from"),
    "cycle_start_step": STEP,
    "included_step": STEP,
    "tokens": TOKENS,
    "steps_max": STEP,
    "tokens_max": SUM,
    "included_tokens": TOKENS,
    "bodies": Items(64),
    # Times and rates
    "*_ns": Whole(0, SPAN_NS_MAX),
    "egress": Whole(0, RATE_MAX),
    "ingress": Whole(0, RATE_MAX),
    # Settings that the ledger holds, as `config.schema` bounds them
    "outer_lr": Real(POSITIVE_MIN, 10.0),
    "outer_momentum": Real(0.0, BELOW_ONE),
    "SettingsBody.sync_every": Whole(1, SYNC_EVERY_MAX),
    "SettingsBody.overlap_steps": Whole(0, SYNC_EVERY_MAX),
    "SettingsBody.quorum_min": Whole(0, REGIONS),
    "SettingsBody.grace_gamma": Real(0.0, 1.0),
    "SettingsBody.rounds_in_flight_max": Whole(1, 64),
    "SettingsBody.carry_steps_max": Whole(0, 1 << 40),
    "SettingsBody.weight_cap": Real(1.0, 1000.0),
    "SettingsBody.weight_share_max": Real(POSITIVE_MIN, 1.0),
    "SettingsBody.tokens_ratio_max": Real(1.0, 64.0),
    # The same name with another meaning
    "Entry.term": Whole(1, INDEX_MAX),
    "BaseSent.base_term": INDEX,
    "BaseSent.summary": Octets((), most=SUMMARY_BYTES_MAX),
    "Heartbeat.echo": INDEX,
    "MergedReceived.digests": Items(STRIPES, Octets((0, HASH_BYTES))),
    "nonces": Items(2, HASH),
    "BallotOpened.commitment": Octets((0, HASH_BYTES)),
    "ContributionProjected.projections": Items(WINDOWS, PROJECTION),
    "RoundBody.projections": Items(REGIONS, Items(WINDOWS, PROJECTION)),
    "RoundBody.members": Items(REGIONS),
    "RoundBody.version": Whole(1, VERSION_MAX),
    # What stands for entries (`core.ledger.summary`)
    "RunSummary.genesis": Items(1),
    "RunSummary.finished": Items(1),
    "RunSummary.version_entries": Items(FRAGMENTS, INDEX),
    "RunSummary.versions": Items(FRAGMENTS, REACHED),
    "RunSummary.snapshots": Items(2 * FRAGMENTS),
    "RunSummary.merged": Items(FRAGMENTS, SUM),
    "RunSummary.discarded": Items(FRAGMENTS, SUM),
    "RunSummary.covered": Items(REGIONS * FRAGMENTS),
    "RunSummary.closed": Items(REGIONS),
    "RunSummary.included": Items(REGIONS * FRAGMENTS),
    "RunSummary.given_up": Items(REGIONS * FRAGMENTS),
    "RunSummary.last_rounds": Items(FRAGMENTS, REACHED),
    "RunSummary.rounds_committed": INDEX,
    "RunSummary.recent": Items(FRAGMENTS, Octets((), most=SUMMARY_BYTES_MAX)),
    "RunSummary.joined": Items(REGIONS),
    "RunSummary.members": Items(REGIONS),
    "RosterShown.members": Items(REGIONS),
    "Membership.since": INDEX,
    "Membership.folders": INDEX,
    "RunSummary.revocations": Items(REVOKED, HASH),
    "RunSummary.settings": Items(1),
    "GenesisBody.settings": Items(1),
    "Covered.steps": Items(FRAGMENTS, STEP),
    "Covered.tokens": Items(FRAGMENTS, TOKENS),
    "Closed.steps": SUM,
    "Closed.tokens": Items(FRAGMENTS, SUM),
    "Included.step_to": STEP,
    "GivenUp.step_to": STEP,
    "GivenUp.version": REACHED,
    "Included.tokens_to": TOKENS,
    "Joined.rounds": INDEX,
    "RunSummary.shards": Items(1),
    "ShardLines.lives": Items(SHARDS),
    "ShardLines.waits": Items(REGIONS),
    "ShardLife.starts": Items(SHARDS, Whole(0, ROWS_MAX)),
    "ShardLife.stops": Items(SHARDS, Whole(0, ROWS_MAX)),
}
