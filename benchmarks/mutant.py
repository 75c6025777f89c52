"""A region with a valid certificate whose messages are wrong in one field at a time, over the real listener.

`Mutant` is the client. It speaks with the real transport, beats as a live region does, and hears what the others say.
From that it makes right messages of each kind, as this region could send them now, and `mutations` makes wrong ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutations import Mutation, completed, sample

from diloco_node.cli.admin_client import order
from diloco_node.core import messages as m
from diloco_node.core import types as t
from diloco_node.core.ledger.entries import seal
from diloco_node.core.member_kind import Membership
from diloco_node.daemon.manifest_file import load_manifest
from diloco_node.daemon.spec import NodeSpec
from diloco_node.errors import DilocoError, LinkLost, PeerError
from diloco_node.state_names import NODE_NAME
from diloco_node.transport.certificates import load_identity
from diloco_node.transport.peer_session import LinkTimes
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import envelope
from diloco_node.wire.message_tables import BULK_HEADERS, ENTRY_BODIES, MESSAGES

TIMES = LinkTimes(backoff_min_s=0.05, backoff_max_s=0.2, violation_backoff_s=0.1)
UP_S = 60.0
LIFT_S = 0.15
"""A link that is not up again by then may be one of a peer that has shut us out."""

PAUSE_S = 0.006
"""Between two messages: a flood would only show that floods are slowed down."""


@dataclass(eq=False)
class Mutant:
    """The client. `start` once, then send; `stop` at the end.

    Args:
        folder: of the run. region: whose certificate, settings and model it has; its daemon must not run.

    Attributes:
        ups: links that came up, by peer. sent: messages by peer, last_sent: the last of them, for people.
        violations: links that went down after a message. last: of each kind of message the last one that was heard.
        is_beating: whether heartbeats are sent.
    """

    folder: Path
    region: str
    ups: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    violations: int = 0
    last: dict[type, Any] = field(default_factory=dict)
    is_beating: bool = True
    last_sent: str = ""
    _sequence: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _transfers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _heard: dict[str, int] = field(default_factory=dict)

    async def start(self, status: Mapping[str, Any]) -> None:
        """Link with all others. `status`: the region's last one, from which the learner's figures are taken."""
        self.spec = NodeSpec.load(self.folder / self.region / NODE_NAME)
        manifest = load_manifest(self.folder / self.region)
        assert manifest is not None
        self.manifest = manifest
        self._status = status
        self._executor = ThreadPoolExecutor(2)
        self._is_up: dict[str, asyncio.Event] = {peer: asyncio.Event() for peer in self.spec.peers}
        self.transport = GrpcTransport(
            region=self.region,
            run_id=self.spec.run_id,
            settings_digest=self.spec.settings_digest,
            manifest_digest=manifest.digest,
            identity=load_identity(self.spec.identity_dir, region=self.region, run_id=self.spec.run_id),
            listen=(self.spec.listen_host, self.spec.listen_port),
            peers=self.spec.peers,
            handler=self,
            executor=self._executor,
            times=TIMES,
        )
        await self.transport.start()
        for peer in self.peers:
            await self.until_up(peer)
        self._beats = asyncio.create_task(self._beat())

    async def stop(self) -> None:
        """Close the links, and lift quarantines as an operator would: the region's own daemon did no wrong."""
        self._beats.cancel()
        await asyncio.gather(self._beats, return_exceptions=True)
        await self.transport.stop()
        self._executor.shutdown()
        for peer in self.peers:
            await self._lift(peer)

    @property
    def peers(self) -> list[str]:
        """The other regions."""
        return sorted(self.spec.peers)

    # ---- TransportHandler --------------------------------------------------------------------------------------------

    def control_arrived(self, peer: str, message: Any) -> None:
        """Keep the last of each kind."""
        self.last[type(message)] = message
        if isinstance(message, m.Heartbeat):
            self._heard[peer] = message.sequence

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        """Keep it."""
        if is_up:
            self.ups[peer] = self.ups.get(peer, 0) + 1
            self._is_up[peer].set()
        else:
            self._is_up[peer].clear()

    def transfer_opened(self, peer: str, header: Any, raw_bytes: int) -> None:
        """Nothing is wanted."""

    def transfer_closed(self, peer: str, header: Any, buffer: memoryview, *, is_whole: bool) -> None:
        """Nothing was wanted."""

    # ---- sending -----------------------------------------------------------------------------------------------------

    async def until_up(self, peer: str) -> None:
        """Wait for the link; a quarantine is lifted as an operator would, else the next message would reach nobody.

        Raises:
            LinkLost: it does not come up any more.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while not self._is_up[peer].is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LIFT_S):
                    await self._is_up[peer].wait()
                    return
            if loop.time() - started_s > UP_S:
                raise LinkLost(f"{peer}: no link within {UP_S:.0f} s; the last that was sent: {self.last_sent}")
            await self._lift(peer)

    async def _lift(self, peer: str) -> None:
        with contextlib.suppress(DilocoError):
            await asyncio.to_thread(order, self.folder / peer, "quarantine/lift", {"peer": self.region})

    async def send(self, peer: str, mutation: Mutation) -> None:
        """One wrong message, and a moment for the peer to look at it."""
        await self.until_up(peer)
        link = self.transport._link(peer)
        if not mutation.is_header:
            link.send(b"\x02" + mutation.data)
        elif link.session is not None:
            await self._transfer(link.session.streams[1], mutation.data)
        self.sent[peer] = self.sent.get(peer, 0) + 1
        self.last_sent = mutation.text
        if mutation.has_shape:
            await asyncio.sleep(PAUSE_S)
            return
        with contextlib.suppress(TimeoutError):  # what the peer must refuse: the link goes down
            async with asyncio.timeout(2.0):
                while self._is_up[peer].is_set():  # noqa: ASYNC110 - an event for the other way would not be shorter
                    await asyncio.sleep(0.01)
                self.violations += 1

    async def _transfer(self, stream: Any, header: bytes) -> None:
        """A whole transfer of eight bytes, as far as the peer lets it come."""
        number = next(self._transfers)
        begin = struct.pack("<BQQ", envelope.KIND_BEGIN, number, 8) + header
        chunk = envelope.encode_chunk(number, 0, 8, bytes(8), is_compressed=False)
        try:
            for frame in (begin, chunk, envelope.encode_end(number, (1,))):
                await stream.write(frame)
        except PeerError:
            return
        except asyncio.CancelledError:  # so gRPC ends a write when the link goes down
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise

    async def _beat(self) -> None:
        while True:
            if self.is_beating:
                for peer in self.peers:
                    if self._is_up[peer].is_set():
                        self.transport.send(peer, self.heartbeat(peer))
            await asyncio.sleep(self.spec.settings.heartbeat_ns / 1e9)

    # ---- right messages ----------------------------------------------------------------------------------------------

    def heartbeat(self, peer: str) -> m.Heartbeat:
        """As a live region would send it: its learner trains and has nothing to contribute yet."""
        heard = self.last.get(m.Heartbeat)
        given = {
            "sequence": next(self._sequence),
            "echo": self._heard.get(peer, 0),
            "echo_delay_ns": 1_000_000,
            "hears": tuple(self.peers),
            "learner": self.learner(),
            "applied_index": self._status["applied_index"],
            "digests": (),
            "budget": t.RateLimits(10**9, 10**9),
            "disk": self.disk(),
        }
        base: m.Heartbeat = heard or sample(m.Heartbeat, given | {"region": self.region})
        names = {one.name for one in dataclasses.fields(m.Heartbeat)}
        return dataclasses.replace(base, **{name: value for name, value in given.items() if name in names})

    def disk(self) -> bytes:
        """The id of the region's folder, which its daemon left there."""
        path = self.folder / self.region / "disk.id"
        return path.read_bytes()[8:24] if path.exists() else bytes(16)

    def learner(self) -> t.LearnerStatus:
        """What its learner would say."""
        learner = self._status["learner"]
        versions = self.versions()
        step = learner["step"]
        positions = tuple(
            t.FragmentPosition(max(0, version), step, one["included_step"], one["included_tokens"])
            for version, one in zip(versions, learner["positions"], strict=True)
        )
        return t.LearnerStatus(learner["incarnation"], step, learner["tokens"], 100_000_000, positions)

    def versions(self) -> list[int]:
        """Of each fragment, as far as it knows."""
        now = list(self._status["versions"])
        opened = self.last.get(m.BallotOpened)
        if opened is not None:
            now[opened.fragment] = max(now[opened.fragment], opened.version - 1)
        return now

    def bases(self) -> list[Any]:
        """A right message of each kind of the control lane; AppendEntries with an entry of each kind."""
        append = self._append()
        known = self._known()
        made = [sample(m.RequestVote, known | {"pre_vote": pre_vote}) for pre_vote in (False, True)]
        digest = t.FragmentDigest(known["fragment"], known["version"], bytes(16))
        made.append(dataclasses.replace(self.heartbeat(self.peers[0]), digests=(digest,)))
        bodies = [sample(body, known) for body in ENTRY_BODIES.values()]
        made += [dataclasses.replace(append, entries=(self._entry(append, body),)) for body in bodies]
        done = {type(one) for one in made}
        made += [sample(cls, known) for cls in MESSAGES.values() if cls not in done]
        return [completed(one, known) for one in made]

    def headers(self) -> list[Any]:
        """A right header of each kind of transfer."""
        return [sample(cls, self._known()) for cls in BULK_HEADERS.values()]

    def contribution(self, fragment: int, version: int) -> t.Contribution:
        """What its learner could contribute."""
        learner = self.learner()
        norms = (1.0,) * len(self.manifest.fragments[fragment].pieces)
        position = learner.positions[fragment]
        step_from = position.included_step
        tokens = learner.tokens - position.included_tokens
        return t.Contribution(
            self.region,
            learner.incarnation,
            fragment,
            version - 1,
            9,
            step_from,
            learner.step,
            tokens,
            norms,
            rows=(0,),
        )

    def _append(self) -> m.AppendEntries:
        """The last one that was heard."""
        none: dict[str, Any] = {"term": 1, "entries": (), "region": self.region}
        append: m.AppendEntries = self.last.get(m.AppendEntries) or sample(m.AppendEntries, none)
        return append

    def _entry(self, append: m.AppendEntries, body: Any) -> t.Entry:
        return seal(append.previous_index + 1, max(1, append.term), append.previous_hash, body)

    def _known(self) -> dict[str, Any]:
        """What fields of these names hold in a right message, wherever they are; some by class and name."""
        append, opened = self._append(), self.last.get(m.BallotOpened)
        regions = tuple(sorted([*self.peers, self.region]))
        fragment = opened.fragment if opened is not None else 0
        made = self.contribution(fragment, self.versions()[fragment] + 1)
        return {
            "run_id": self.spec.run_id,
            "manifest_digest": self.manifest.digest,
            "settings_digest": self.spec.settings_digest,
            "regions": regions,
            "fragment_digests": tuple(bytes(32) for _ in self.manifest.fragments),
            "disks": tuple(bytes(16) for _ in regions),
            "disk": self.disk(),
            "region": self.region,
            "leader": self.region,
            "learner": self.region,
            "successor": self.region,
            "term": append.term,
            "sequence": append.sequence,
            "last_index": 10**6,
            "last_term": append.term,
            "granted": True,
            "accepted": True,
            "durable_index": append.previous_index,
            "durable_hash": append.previous_hash,
            "ballot": opened.ballot if opened is not None else t.Ballot(append.term, 1),
            "fragment": fragment,
            "version": made.base_version + 1,
            "version_min": made.base_version + 1,
            "members": (t.Member(made, 1.0),),
            "BallotOpened.members": regions,
            "RosterShown.members": tuple(Membership(name, "voter", bytes(16), 2, "", 1) for name in regions),
            "contribution": made,
            "contributions": (made,),
            "coefficients": ((1.0,) * len(made.squared_norms),),
            "factors": (1.0,) * len(made.squared_norms),
            "squared_norms": made.squared_norms,
            "contribution_norms": (made.squared_norms,),
            "stripes": opened.stripes if opened is not None else (t.Stripe(regions[0], 0, 8),),
            "block_start": 0,
            "block_stop": 8,
            "incarnation": made.incarnation,
            "step_from": 0,
            "step_to": 1,
            "versions": tuple(self.versions()),
        }
