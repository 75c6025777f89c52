"""What `measure` does: who we are, where the others are, and the measurements. `measure_cmd` has the commands."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from diloco_node.errors import ConfigError, DilocoError, LinkLost, PeerError, PeersUnreachable, StorageError

if TYPE_CHECKING:
    from diloco_node.adapters.flows import FlowTimes
    from diloco_node.adapters.probe import FlowMeasured, LatencyMeasured, ProbeSession
    from diloco_node.adapters.series import Keep
    from diloco_node.config import NodeConfig
    from diloco_node.measure.documents import FlowCase
    from diloco_node.transport.certs import Identity
    from diloco_node.wire.measurement import PairAsked, PairMeasured, SessionOpened

T = TypeVar("T")

MESH_PROBE_S: Final = 1.5
RTT_PROBE_S: Final = 0.5
CONNECTIONS: Final = "1,2,4,8"


# ---- who we are, and where the others are ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Here:
    """This end: our certificate, and run.toml if there is one.

    Attributes:
        folder: with our certificate and key.
    """

    name: str
    identity: Identity
    folder: Path
    config: NodeConfig | None

    @classmethod
    def find(cls, config: Path | None, certs: Path | None, region: str | None) -> Here:
        """From flags, run.toml, and the keys that lie here.

        Raises:
            ConfigError: there are several keys and none was chosen. IdentityError: the certificate is wrong or missing.
        """
        from diloco_node.config.resolve import DEFAULT_NAME
        from diloco_node.transport.certs import load_identity

        resolved = None
        if config is not None or Path(DEFAULT_NAME).exists():
            from diloco_node.cli.options import load

            resolved = load(config, {}, None)
            if region is not None:
                resolved.check_region(region)
        folder = certs if certs is not None else resolved.run.certs_dir if resolved is not None else Path("certs")
        folder = own_folder(folder, region)
        identity = load_identity(folder, region=region, run_id=resolved.run.id if resolved is not None else None)
        return cls(identity.region, identity, folder, resolved)

    def listen(self) -> tuple[str, int]:
        """What to bind when nothing was said. Raises ConfigError."""
        if self.config is None or self.name not in self.config.regions:
            raise ConfigError("without run.toml, measure serve needs --listen HOST:PORT, for example 0.0.0.0:7400")
        return self.config.listen(self.name)

    def addresses(self) -> dict[str, str]:
        """Of the other regions that can be dialed."""
        regions = self.config.regions if self.config is not None else {}
        return {name: one.address for name, one in regions.items() if one.address is not None and name != self.name}

    async def resolve(self, peer: str) -> tuple[str, str]:
        """Name and address of a peer as it was written. Raises ConfigError, PeersUnreachable, IdentityError."""
        if self.config is not None and peer in self.config.regions:
            if peer == self.name:
                raise ConfigError(f"{peer} is this region: name another one, or say who we are with --region")
            address = self.config.regions[peer].address
            if address is None:
                raise ConfigError(f"{peer} has no address in run.toml: measure from there, with --reverse for this way")
            return peer, address
        if ":" not in peer:
            known = ", ".join(self.config.regions) if self.config is not None else "no run.toml here"
            raise ConfigError(f"PEER is {peer!r}: write a region of run.toml ({known}), or HOST:PORT")
        parse_address(peer, "PEER", port_min=1)
        from diloco_node.adapters.probe import region_at

        return await region_at(peer, self.folder), peer

    def pairs(self) -> list[tuple[str, str]]:
        """All ordered pairs of regions. Raises ConfigError without run.toml or with one region."""
        if self.config is None:
            raise ConfigError("measure mesh needs a run.toml with all regions: name it with --config")
        if len(self.config.regions) < 2:
            raise ConfigError("there is one region in run.toml: a mesh needs two")
        if self.name not in self.config.regions:
            raise ConfigError(f"{self.name} is not in run.toml: choose another --region")
        return [(a, b) for a in self.config.regions for b in self.config.regions if a != b]


def own_folder(certs: Path, region: str | None) -> Path:
    """The folder of our key: of the region, the only one there is, or `certs` itself."""
    if (certs / "node.key").exists():
        return certs
    if region is not None:
        return certs / region
    found = sorted(path.parent for path in certs.glob("*/node.key"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"{certs} has the keys of {names}: say who we are with --region NAME")
    return found[0] if found else certs  # whose files are missing, as load_identity will say


def parse_address(text: str, option: str, *, port_min: int) -> tuple[str, int]:
    """`HOST:PORT` of an option, IPv6 in brackets. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and port_min <= int(port) <= 65_535
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not is_port or (":" in host and not is_bracketed):
        raise ConfigError(f"{option} is {text!r}: write HOST:PORT, as 10.0.0.1:7400 or [fd00::1]:7400")
    return host.strip("[]"), int(port)


def parse_connections(text: str) -> list[int]:
    """`1,4` as sorted numbers, each once. Raises ConfigError."""
    from diloco_node.wire.measurement import CONNECTIONS_MAX

    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 1 <= int(word) <= CONNECTIONS_MAX for word in words):
        raise ConfigError(f"--connections is {text!r}: write numbers from 1 to {CONNECTIONS_MAX}, as {CONNECTIONS}")
    return sorted({int(word) for word in words})


# ---- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HowLong:
    """Seconds of each test; of the warm-up, None: by the round trip."""

    seconds: float
    warm_up: float | None


async def serve(
    here: Here, where: tuple[str, int], plain_port: int | None, told: Callable[[dict[str, Any]], None]
) -> None:
    """Answer measurements until SIGINT or SIGTERM; `told` is called with where we listen. Raises BindError."""
    from diloco_node.adapters.probe_server import ProbeServer

    _set_up_logs_of_serve()
    server = ProbeServer(here.identity, where, plain_port=plain_port, addresses=here.addresses())
    try:
        await server.start()
        told({"region": here.name, "host": where[0], "port": server.port, "plain_port": server.plain_port or None})
        await _until_signal()
    finally:
        await server.stop()


async def latency(here: Here, peer: str, how_long: HowLong, *, is_loaded: bool, keep: Keep) -> dict[str, Any]:
    """Round trips to a peer, also under load; `keep` gets what there is so far.

    Raises:
        PeersUnreachable, IdentityError, PeerError: as `resolve`, or one of them could not be measured.
    """
    from diloco_node.measure.documents import latency_document

    name, address = await here.resolve(peer)
    with progress(f"round trips to {name}") as say:
        idle = await _with_session(here, name, address, lambda one: one.latency(how_long.seconds))
        about = {"from": here.name, "to": name, "address": address, "seconds": how_long.seconds}
        rows = [latency_document("none", idle)]
        keep({**about, "rows": list(rows)})
        for what in ("out", "in") if is_loaded else ():
            say(f"round trips to {name} while the link is full ({what})")
            loaded = partial(_loaded_latency, how_long=how_long, is_sending=what == "out")
            measured = await _with_session(here, name, address, loaded)
            rows.append(latency_document(what, measured))
            keep({**about, "rows": list(rows)})
    return {**about, "rows": rows}


async def bandwidth(
    here: Here, peer: str, counts: Sequence[int], how_long: HowLong, *, is_reverse: bool, is_plain_too: bool, keep: Keep
) -> dict[str, Any]:
    """Goodput to a peer (or from it) on each path; `keep` gets what there is so far.

    Raises:
        PeersUnreachable, IdentityError, PeerError: nothing could be measured. What fails later is in the document.
    """
    from diloco_node.adapters.probe_server import congestion_control
    from diloco_node.adapters.series import run_series
    from diloco_node.measure.documents import FlowCase, flow_document

    name, address = await here.resolve(peer)
    kinds = [("transport", "random"), ("transport", "int4"), *([("plain", "random")] if is_plain_too else [])]
    source, target = (name, here.name) if is_reverse else (here.name, name)
    cases = [FlowCase(source, target, *kind, count) for count in counts for kind in kinds]
    with progress(f"round trips to {name}") as say:
        (times, rtt_ns), opened = await _with_session(here, name, address, lambda one: _beginning(one, how_long))

        async def test(case: FlowCase) -> dict[str, Any]:
            """In a session of its own: after a test that failed nobody knows what the other end still wants to say."""
            flow = partial(_flow, case=case, times=times, is_sending=not is_reverse)
            return flow_document(case, await _with_session(here, name, address, flow))

        about = {
            "from": source,
            "to": target,
            "address": address,
            "warm_up_seconds": times.warm_up_ns / 1e9,
            "seconds": how_long.seconds,
            "rtt_seconds": rtt_ns / 1e9,
            "congestion_control": {"here": congestion_control(), "there": opened.congestion_control},
        }
        return {**about, **await run_series(cases, test, say, lambda found: keep({**about, **found}))}


async def _with_session(
    here: Here, name: str, address: str, work: Callable[[ProbeSession], Coroutine[Any, Any, T]]
) -> T:
    from diloco_node.adapters.probe import open_session

    async with open_session(here.identity, name, address) as session:
        return await work(session)


async def _times(session: ProbeSession, how_long: HowLong) -> tuple[FlowTimes, int]:
    """How long flows are to be, and the round trip that this was taken from."""
    from diloco_node.adapters.flows import FlowTimes
    from diloco_node.adapters.probe import warm_up_ns
    from diloco_node.measure.samples import NS_PER_S

    rtt_ns = (await session.latency(RTT_PROBE_S)).latency.p50_ns
    warm_ns = warm_up_ns(rtt_ns) if how_long.warm_up is None else int(how_long.warm_up * NS_PER_S)
    return FlowTimes(warm_ns, int(how_long.seconds * NS_PER_S)), rtt_ns


async def _flow(session: ProbeSession, *, case: FlowCase, times: FlowTimes, is_sending: bool) -> FlowMeasured:
    from diloco_node.wire.measurement import FlowBody, FlowPath

    if case.path == "plain" and not session.opened.plain_port:
        raise PeerError(f"{session.peer} takes none (`measure serve --no-plain`)")
    return await session.flow(
        times,
        is_sending=is_sending,
        path=FlowPath(case.path),
        body=FlowBody(case.body),
        connections=case.connections,
    )


async def _beginning(session: ProbeSession, how_long: HowLong) -> tuple[tuple[FlowTimes, int], SessionOpened]:
    """What holds for all flows: see `_times`, and what the peer says of itself."""
    return await _times(session, how_long), session.opened


async def _loaded_latency(session: ProbeSession, *, how_long: HowLong, is_sending: bool) -> LatencyMeasured:
    """Probes on a connection of their own while a flow fills the link, as heartbeats run beside bulk."""
    from diloco_node.adapters.flows import FlowTimes
    from diloco_node.measure.samples import NS_PER_S
    from diloco_node.wire.measurement import SPAN_NS_MAX, FlowBody, FlowPath

    times, _ = await _times(session, how_long)
    # The flow goes on for longer than the probes, so that the last of them meets it too.
    longer = FlowTimes(times.warm_up_ns, min(times.span_ns + NS_PER_S, SPAN_NS_MAX))
    filling = asyncio.create_task(
        session.flow(longer, is_sending=is_sending, path=FlowPath.TRANSPORT, body=FlowBody.RANDOM, connections=1)
    )
    try:
        done, _ = await asyncio.wait([filling], timeout=times.warm_up_ns / NS_PER_S)
        for task in done:
            task.result()  # it can't be over already: this raises why it failed
        measured = await session.latency(how_long.seconds)
        await filling  # had it failed on the way, these would not be times under load
        return measured
    finally:
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)


async def mesh(
    here: Here, pairs: Sequence[tuple[str, str]], how_long: HowLong, *, is_plain_too: bool, keep: Keep
) -> dict[str, Any]:
    """Each pair in turn; those that fail are told, and the others go on. `keep` gets what there is so far."""
    from diloco_node.measure.documents import pair_document
    from diloco_node.wire.measurement import PairAsked

    warm_ns, span_ns = int((how_long.warm_up or 0) * 1e9), int(how_long.seconds * 1e9)
    probes_ns = int(min(MESH_PROBE_S, how_long.seconds) * 1e9)
    addresses = here.addresses()
    names = sorted({name for pair in pairs for name in pair})
    found: dict[str, Any] = {"regions": names, "pairs": [], "failures": [], "seconds": how_long.seconds}
    with progress("the mesh") as say:
        for number, (source, target) in enumerate(pairs, start=1):
            say(f"pair {number} of {len(pairs)}: {source} to {target}")
            asked = PairAsked(target, addresses.get(target, ""), probes_ns, warm_ns, span_ns, is_plain_too)
            try:
                found["pairs"].append(pair_document((source, target), await _pair(here, addresses, source, asked)))
            except DilocoError as error:
                found["failures"].append({"from": source, "to": target, "error": str(error)})
            keep(found)
    return found


async def _pair(here: Here, addresses: Mapping[str, str], source: str, asked: PairAsked) -> PairMeasured:
    """From here, to here, or between two others: whoever sends dials, unless that is not us but the peer is."""
    from diloco_node.adapters.pairs import measure_out

    target = asked.region
    dialed = target if source == here.name else source
    for name in (dialed, target):
        if name not in addresses and name != here.name:
            raise PeersUnreachable(f"{name} has no address in run.toml: run `diloco-node measure mesh` there")
    if source == here.name:
        return await _with_session(
            here, target, addresses[target], lambda one: measure_out(one, asked, is_sending=True)
        )
    if target == here.name:
        return await _with_session(
            here, source, addresses[source], lambda one: measure_out(one, asked, is_sending=False)
        )
    return await _with_session(here, source, addresses[source], lambda one: one.pair(asked))


# ---- the rest --------------------------------------------------------------------------------------------------------


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run on the loop that the daemon uses. A link that breaks on the way ends with exit code 5."""
    import uvloop

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(work())
    except LinkLost as error:
        raise PeersUnreachable(str(error)) from error


async def _until_signal() -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    await ended.wait()


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """A line on the terminal that tells what is going on; nothing where standard error is none."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text, refresh_per_second=4) as status:
        yield status.update


def _set_up_logs_of_serve() -> None:
    from diloco_node.daemon.process import set_up_logs

    set_up_logs()
    # It logs a traceback for each call that its dialing side has left meanwhile, which is how every flow ends.
    logging.getLogger("grpc").setLevel(logging.CRITICAL)


def check_writable(path: Path) -> None:
    """Refuse a file that can't be written, with ConfigError. One that was not there is not there afterwards."""
    try:
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--out {path} can't be written ({error.strerror})") from error


def write(path: Path, text: str) -> None:
    """Write a result. Raises StorageError."""
    try:
        path.write_text(text)
    except OSError as error:
        raise StorageError(f"--out {path} can't be written ({error.strerror}): what was measured is above") from error
