"""Facts and verdicts together: one function for each category, in the order in which they are shown."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_node import __version__
from diloco_node.cli import start
from diloco_node.cli.doctor import machine_facts as probes
from diloco_node.cli.doctor import topics, verdicts
from diloco_node.cli.places import is_there
from diloco_node.errors import BindError, ConfigError, DilocoError, IdentityError, PeerError
from diloco_node.health.finding import Finding, read_alert
from diloco_node.health.reading import rows, section
from diloco_node.state_names import MEMORY_SOCKET_NAME, NODE_NAME
from diloco_node.unix_sockets import socket_path

if TYPE_CHECKING:
    from diloco_node.config.resolve import NodeConfig
    from diloco_node.planning.plan import Storage
    from diloco_node.transport.asking import PeerAnswer
    from diloco_node.transport.certificates import Identity


@dataclass(frozen=True, slots=True)
class Patient:
    """A region to examine. status: of its own daemon, as `status --json` has it; None: none answers."""

    config: NodeConfig
    region: str
    status: Mapping[str, Any] | None

    @property
    def folder(self) -> Path:
        """Its state folder."""
        return self.config.state_dir(self.region)

    @property
    def addresses(self) -> dict[str, str | None]:
        """Where each peer is dialled: as its daemon knows from the ledger, else as run.toml says; None: it dials us."""
        if peers := rows(self.status or {}, "peers"):
            return {str(peer.get("name")): peer.get("address") for peer in peers}
        return {name: settings.address for name, settings in self.config.regions.items() if name != self.region}

    def storage(self) -> Storage | None:
        """Memory and disk that it needs, as `plan` says; None: the model is not known yet."""
        from diloco_node.cli.plan.inputs import source_of_config
        from diloco_node.planning.plan import Workload, storage

        settings = self.config.run_settings()
        try:
            source = source_of_config(self.config, self.config.path)
            sizes = source.sizes(settings.fragments)
        except (DilocoError, OSError):  # the daemon mends a manifest that is damaged
            return None
        return storage(Workload(sizes, source.regions, settings, step_time_ns=1))


def examine_machine(patient: Patient | None) -> Iterator[Finding]:
    """Check version, kernel, disk, memory and clock; what depends on run.toml only where there is one."""
    from diloco_node.wire.message_tables import PROTOCOL_VERSION

    yield topics.PROGRAM.ok(f"diloco-node {__version__}, protocol {PROTOCOL_VERSION}")
    yield from _kernel()
    if patient is not None:
        yield from _disk_and_memory(patient)
    yield verdicts.clock_sync(probes.is_clock_synced())


def _kernel() -> Iterator[Finding]:
    from diloco_node.daemon.process_setup import DESCRIPTORS_LOW
    from diloco_node.transport.kernel.congestion import own_congestion_controls

    controls = own_congestion_controls()
    if controls is not None:
        yield verdicts.congestion_control(controls.usual, controls.long_rtt)
    yield verdicts.tcp_buffers(*(probes.sysctl_last(f"net/ipv4/tcp_{name}") for name in ("rmem", "wmem")))
    yield verdicts.descriptors(probes.descriptor_limit(), DESCRIPTORS_LOW)


def _disk_and_memory(patient: Patient) -> Iterator[Finding]:
    needs = patient.storage()
    folder = probes.nearest_folder(patient.folder.resolve())
    free, error = probes.free_bytes(folder)
    yield verdicts.disk_space(
        str(patient.folder),
        free=free,
        usage=probes.used_bytes(patient.folder),
        need=None if needs is None else needs.disk,
        error=error,
    )
    heartbeat_s = patient.config.rounds.heartbeat.ns / 1e9
    yield verdicts.fsync_time([] if free is None else probes.fsync_seconds(folder), heartbeat_s)
    if free is not None:  # else that is what is wrong
        yield verdicts.locks(probes.lock_error(folder))
        yield _sockets(patient.folder.resolve(), folder)
    need = None if needs is None else needs.memory
    yield verdicts.memory(probes.available_memory(), need, is_taken=patient.status is not None)


def _sockets(state_dir: Path, folder: Path) -> Finding:
    """Bind where the region's sockets will be. folder: the state folder, or the closest one above it that is there."""
    try:
        place = socket_path(state_dir, MEMORY_SOCKET_NAME).parent
    except (BindError, OSError) as error:
        return verdicts.sockets("", str(error), is_direct=False)
    is_direct = place == state_dir
    return verdicts.sockets(str(place), probes.bind_error(folder if is_direct else place), is_direct=is_direct)


def examine_settings(patient: Patient) -> Iterator[Finding]:
    """Compare run.toml with the settings with which each region on this machine was started."""
    from diloco_node.daemon.spec import NodeSpec

    yield topics.RUN_TOML.ok(f"{patient.config.path} is right")
    now = dataclasses.asdict(patient.config.run_settings())
    for name in patient.config.regions:
        file = patient.config.state_dir(name) / NODE_NAME
        if is_there(file):
            try:
                yield verdicts.settings_kept(name, dataclasses.asdict(NodeSpec.load(file).settings), now)
            except DilocoError as error:
                yield topics.UNCHANGED.warning(str(error), f"start {name} again: the file is written anew")


def examine_identity(patient: Patient, now: dt.datetime) -> tuple[list[Finding], Identity | None]:
    """Check the region's certificate, and return it with the findings; None: it can't be used."""
    from diloco_node.transport.certificates import load_identity

    folder = patient.config.identity_dir(patient.region)
    try:
        identity = load_identity(folder, region=patient.region, run_id=patient.config.run.id, now=now)
    except IdentityError as error:
        return [verdicts.certificate(str(folder), str(error))], None
    key = folder / "node.key"
    fingerprint = identity.certificate.fingerprint.hex()
    is_taken = section(patient.status or {}, "certificate").get("fingerprint", fingerprint) == fingerprint
    findings = [
        verdicts.certificate(f"{identity.region} of run {identity.run_id}", "", is_taken=is_taken),
        verdicts.certificate_expiry(identity.certificate.not_after, now),
        verdicts.key_mode(str(key), key.stat().st_mode),
    ]
    return findings, identity


def examine_ports(patient: Patient) -> Iterator[Finding]:
    """Check the region's own ports: for peers, and for status and metrics."""
    settings, is_own = patient.config.regions[patient.region], patient.status is not None
    ports = ((*patient.config.listen(patient.region), "listen"), ("127.0.0.1", settings.admin_port, "admin_port"))
    for host, port, key in ports:
        if port:
            error = ""
            try:
                start.check_port(host, port, f"regions.{patient.region}.{key}")
            except BindError as refusal:
                error = str(refusal)
            yield verdicts.port(f"{host}:{port}", error, is_own)


def examine_peers(patient: Patient, identity: Identity) -> Iterator[Finding]:
    """Check each peer: dialled with the run's certificate, and as our daemon has it."""
    from diloco_node.cli.doctor.peer_probes import SENT_BYTES, look_at_peers

    addresses = patient.addresses
    results = asyncio.run(look_at_peers(identity, {name: place for name, place in addresses.items() if place}))
    for peer, address in addresses.items():
        if not address:
            yield topics.REACHABLE.unknown(f"{peer} has no address, so it dials us")
        else:
            answer, mtu = results[peer]
            if isinstance(answer, PeerError):
                yield verdicts.peer_refused(peer, address, str(answer))
            else:
                yield from _answer_findings(peer, address, answer, patient.config)
            if mtu is not None:
                yield verdicts.path_mtu(peer, mtu.mtu, is_through=mtu.is_through, sent_bytes=SENT_BYTES)
        entries = rows(patient.status or {}, "peers")
        yield from (verdicts.peer_link(entry) for entry in entries if entry.get("name") == peer)


def _answer_findings(peer: str, address: str, answer: PeerAnswer, config: NodeConfig) -> Iterator[Finding]:
    from diloco_node.wire.envelope import LinkRole, settings_difference
    from diloco_node.wire.message_tables import PROTOCOL_VERSION

    yield verdicts.peer_answered(peer, address, answer.rtt_s, answer.hello.role)
    yield verdicts.peer_version(peer, answer.hello.protocol_version, PROTOCOL_VERSION)
    if answer.hello.role is LinkRole.TRAINING:
        settings = tuple(f"{key}={value}" for key, value in config.shared_settings().items())
        difference = settings_difference(settings, answer.hello.settings)
        founding = answer.hello.founding_digest  # empty once the run has begun: its ledger has those settings
        ours = config.settings_digest() + (founding and config.founding_digest())
        yield verdicts.settings_equal(peer, ours, answer.hello.settings_digest + founding, difference)
    if answer.clock_ahead_s is not None:
        yield verdicts.clock_of_peer(peer, answer.clock_ahead_s)


def examine_learner(patient: Patient, command: Sequence[str]) -> Iterator[Finding]:
    """Check what the learner's process needs. command: the user's own; empty: the built-in trainer."""
    config = patient.config
    modules = start.preload_modules(config, command)
    yield verdicts.preload(modules, probes.missing_modules(modules))
    errors = []
    checks: list[Callable[[], None]] = [partial(start.check_init, config), partial(start.check_command, command)]
    if not command:
        checks += [partial(start.check_data, config), partial(start.check_model, config)]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            errors.append(str(error))
    yield verdicts.learner_files(errors)


def examine_run(patient: Patient) -> Iterator[Finding]:
    """Report what the region's daemon says, where one runs."""
    yield verdicts.daemon(patient.region, patient.status)
    if patient.status is None:
        return
    yield from _witness(rows(section(patient.status, "members"), "rows"))
    yield from map(verdicts.alert, map(read_alert, rows(section(patient.status, "health"), "alerts")))


def _witness(members: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Try the conditions of the witness's bucket, with the credentials that are in the environment here."""
    from diloco_node.storage.object_store import bucket_scheme
    from diloco_node.storage.swapped_object import FOLDER, SwappedObject

    for url in (str(row.get("address")) for row in members if row.get("kind") == "witness"):
        try:
            SwappedObject(url, bucket_scheme(url)).check(FOLDER)
        except DilocoError as error:
            yield topics.WITNESS.failed(str(error), "without it this region can't go on alone: do what the line says")
        else:
            yield topics.WITNESS.ok(f"{url} is written under conditions")
