"""Verdicts about this machine, settings, certificates, ports, files, peers, links and alerts. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from diloco_node.cli.doctor import topics
from diloco_node.health.alerts import CERTIFICATE_DAYS
from diloco_node.health.finding import Finding, Mark
from diloco_node.health.reading import human_bytes
from diloco_node.measure.samples import percentile

BUFFER_BYTES_MIN: Final = 16 * 2**20
"""A connection carries at most its buffer in a round trip: 16 MiB are 1.3 Gbit/s over 100 ms."""

FSYNC_WARNING_PART: Final = 0.5
"""Part of the heartbeat. Entries are acknowledged after their fsync, and a slow leader is soon given up."""

CLOCK_WARNING_S: Final = 5.0
CLOCK_FAILED_S: Final = 3600.0
"""Certificates begin an hour before they are made."""


def congestion_control(usual: str, long_rtt: str) -> Finding:
    """Judge the congestion control of sockets with a long round trip."""
    if long_rtt == "bbr":
        return topics.BBR.ok("BBR for long round trips")
    hint = "as root: modprobe tcp_bbr, and add bbr to sysctl net.ipv4.tcp_allowed_congestion_control"
    return topics.BBR.warning(f"no BBR: long links go by {usual}, which loses most of its rate to 1 % loss", hint)


def tcp_buffers(rmem_max: int | None, wmem_max: int | None) -> Finding:
    """Judge the largest buffers in bytes; None: the kernel does not say."""
    if rmem_max is None or wmem_max is None:
        return topics.BUFFERS.unknown("this kernel does not say how large TCP's buffers may grow")
    least = min(rmem_max, wmem_max)
    text = f"TCP buffers grow to {human_bytes(rmem_max)} for receiving, {human_bytes(wmem_max)} for sending"
    if least >= BUFFER_BYTES_MIN:
        return topics.BUFFERS.ok(text)
    at_100_ms = human_bytes(least * 10)
    hint = "as root: sysctl -w net.ipv4.tcp_rmem='4096 131072 134217728' net.ipv4.tcp_wmem='4096 65536 134217728'"
    return topics.BUFFERS.warning(f"{text}: at most {at_100_ms}/s a connection over 100 ms", hint)


def descriptors(hard: int, need: int) -> Finding:
    """Judge the hard limit of open files, to which the daemon raises its own."""
    if hard < need:
        hint = f"raise it to {need} or more: ulimit -Hn, LimitNOFILE= of the unit, --ulimit nofile= of the container"
        return topics.DESCRIPTORS.warning(f"{hard} open files allowed, {need} wanted; half are for connections", hint)
    return topics.DESCRIPTORS.ok(f"{hard} open files allowed")


def disk_space(folder: str, *, free: int | None, usage: int, need: int | None, error: str) -> Finding:
    """Judge the room for the state folder.

    free: bytes of its disk, None: it can't be written, and `error` says why. usage: bytes that the folder has. need: as
    `plan` says; None: the model is not known yet.
    """
    if free is None:
        hint = "make it writable for this user, make room, or set run.state_dir or --state-dir"
        return topics.SPACE.failed(f"{folder} can't be written: {error}", hint)
    if need is None:
        return topics.SPACE.unknown(f"{human_bytes(free)} free for {folder}; the model's size is not known yet")
    text = f"{human_bytes(free)} free for {folder}, which needs {human_bytes(need)} and has {human_bytes(usage)}"
    if free + usage < need:
        missing = human_bytes(need - free - usage)
        hint = f"make room for {missing} more, set run.state_dir to a larger disk, or lower rounds.payload_versions"
        return topics.SPACE.failed(text, hint)
    return topics.SPACE.ok(text)


def fsync_time(seconds: Sequence[float], heartbeat_s: float) -> Finding:
    """Judge the times of small durable writes."""
    if not seconds:
        return topics.FSYNC.unknown("not measured: nothing can be written there")
    p99_s = percentile(seconds, 99)
    text = f"fsync p99 {1e3 * p99_s:.1f} ms of {len(seconds)}"
    if p99_s > FSYNC_WARNING_PART * heartbeat_s:
        hint = "put run.state_dir on a local SSD; or raise rounds.heartbeat and rounds.election_timeout everywhere"
        return topics.FSYNC.warning(f"{text}; the heartbeat is {1e3 * heartbeat_s:.0f} ms", hint)
    return topics.FSYNC.ok(text)


def locks(error: str) -> Finding:
    """Judge whether the state folder's disk gives locks. `error`: why not; empty: it does."""
    text, _, hint = error.partition(": ")
    return topics.LOCKS.failed(text, hint) if error else topics.LOCKS.ok("files can be locked")


def sockets(place: str, error: str, *, is_direct: bool) -> Finding:
    """Judge the folder of the region's Unix sockets. error: why none can be bound there. is_direct: it is the state
    folder, and not the one in the temporary directory for state folders with a long path."""
    why = "" if is_direct else ", for the path of the state folder is too long"
    if error:
        other = "" if is_direct else ", or TMPDIR to one with a short path"
        hint = f"set run.state_dir (--state-dir) to a local disk and a short path{other}"
        return topics.SOCKETS.failed(f"no Unix socket can be bound: {error}{why}", hint)
    return topics.SOCKETS.ok(f"Unix sockets can be bound in {place}{why}")


def memory(available: int | None, need: int | None, *, is_taken: bool) -> Finding:
    """Judge the bytes for the daemon beside the learner's model and optimizer. is_taken: it runs, and has its part."""
    if available is not None and is_taken:
        return topics.MEMORY.ok(f"{human_bytes(available)} available beside the daemon, which runs")
    if available is None or need is None:
        return topics.MEMORY.unknown("what is free, or what the model needs, is not known")
    text = f"{human_bytes(available)} available, the daemon and its shared memory need {human_bytes(need)}"
    if available < need:
        hint = "use a machine with more memory, or a smaller model; diloco-node plan lists what takes how much"
        return topics.MEMORY.failed(text, hint)
    return topics.MEMORY.ok(text)


def clock_sync(is_synced: bool | None) -> Finding:
    """Judge whether something keeps the kernel's clock right."""
    if is_synced is None:
        return topics.SYNCED.unknown("this kernel does not say whether its clock is kept right")
    if not is_synced:
        return topics.SYNCED.warning("nothing keeps this clock right", "install and start chrony or systemd-timesyncd")
    return topics.SYNCED.ok("the clock is kept right (NTP)")


def clock_of_peer(peer: str, ahead_s: float) -> Finding:
    """Compare a peer's wall clock with ours."""
    text = f"{peer}'s clock is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} ours"
    hint = f"set the clocks: install chrony here and in {peer}; logs, certificates and restarts go by them"
    if abs(ahead_s) > CLOCK_FAILED_S:
        return topics.AGREES.failed(text, hint)
    if abs(ahead_s) > CLOCK_WARNING_S:
        return topics.AGREES.warning(text, hint)
    return topics.AGREES.ok(text)


DIGEST_CHARACTERS: Final = 16
SETTINGS_SHOWN_MAX: Final = 8

COPY_HINT: Final = "copy the region's whole folder from where diloco-node certs made it"
RENEW_HINT: Final = (
    "give diloco-node certs renew REGION where ca.key is; copy the region's folder here, and send SIGHUP to its "
    "diloco-node start"
)
_CERTIFICATE_HINTS: Final = (
    (" expired on ", f"{RENEW_HINT}, unless this clock is wrong"),
    (" is valid from ", "install and start chrony here, and where diloco-node certs ran"),
    ("can't be read", "give the folder to the user who runs the region (chown), its key with mode 600"),
)


def settings_kept(region: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Finding:
    """Compare settings that all regions share: as this region was started last, and as run.toml has them now."""
    changes = differences(before, now)
    if not changes:
        return topics.UNCHANGED.ok(f"{region} was last started with the same [run] and [rounds]")
    hint = "put the old values back, or change them in all regions and start all of them again"
    return topics.UNCHANGED.warning(f"since {region} was started last: {changes}", hint)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Settings that differ, with both values; empty when there are none."""
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    words = [f"{name} was {old.get(name)!s:.40}, is {new.get(name)!s:.40}" for name in names[:SETTINGS_SHOWN_MAX]]
    return "; ".join(words) + (f"; {len(names) - len(words)} more" if len(names) > len(words) else "")


def settings_equal(peer: str, ours: str, peer_digest: str, difference: str) -> Finding:
    """Compare digests (hex): of run.toml here, and of the peer's daemon. difference: the settings that differ."""
    if ours == peer_digest:
        return topics.EQUAL.ok(f"{peer} has the same settings, {ours[:DIGEST_CHARACTERS]}")
    hint = f"compare diloco-node config show here and in {peer}: [rounds], run.steps and run.tokens must be the same"
    if difference:
        return topics.EQUAL.failed(f"{peer} runs with other settings: {difference}", hint)
    text = f"{peer} runs with other settings: digest {peer_digest[:DIGEST_CHARACTERS]}, ours {ours[:DIGEST_CHARACTERS]}"
    return topics.EQUAL.failed(text, hint)


def certificate(name: str, error: str, *, is_taken: bool = True) -> Finding:
    """Judge whether it will be accepted (error: why not, the remedy behind a colon), and is what the daemon uses."""
    if not error and not is_taken:
        text = f"{name}: its daemon goes on with the certificate before"
        return topics.CERTIFICATE.warning(text, "send SIGHUP to diloco-node start here")
    if not error:
        return topics.CERTIFICATE.ok(f"{name}, signed by the run's authority")
    hint = next((hint for phrase, hint in _CERTIFICATE_HINTS if phrase in error), COPY_HINT)
    return topics.CERTIFICATE.failed(error, hint)


def certificate_expiry(not_after: dt.datetime, now: dt.datetime) -> Finding:
    """Judge how long the certificate is good for."""
    days = (not_after - now).days
    text = f"valid until {not_after:%Y-%m-%d}, {days} days more"
    if days < CERTIFICATE_DAYS:
        return topics.EXPIRY.warning(text, RENEW_HINT)
    return topics.EXPIRY.ok(text)


def key_mode(path: str, mode: int) -> Finding:
    """Judge whether others may read the key."""
    if mode & 0o077:
        return topics.KEY_MODE.warning(f"{path} can be read by others (mode {mode & 0o777:o})", f"chmod 600 {path}")
    return topics.KEY_MODE.ok(f"{path} is for its owner only")


def port(address: str, error: str, is_own: bool) -> Finding:
    """Judge whether a port is free, or held by this region's own daemon. `error`: why it can't be bound."""
    if not error:
        return topics.PORT.ok(f"{address} is free")
    if is_own:
        return topics.PORT.ok(f"{address} is held by this region's daemon")
    return topics.PORT.failed(
        f"{address}: {error}", "see who has it: ss -ltnp; end that, or set another port in run.toml"
    )


def preload(modules: Sequence[str], missing: Mapping[str, str]) -> Finding:
    """Judge the modules of `learner.preload`. missing: those that can't be imported, with the reason."""
    if missing:
        why = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        hint = (
            "install them in this environment, or take them out of [learner] preload; learners start afresh meanwhile"
        )
        return topics.PRELOAD.failed(f"can't be imported: {why}", hint)
    return topics.PRELOAD.ok(f"{', '.join(modules)} can be imported" if modules else "nothing is preloaded")


def learner_files(errors: Sequence[str]) -> Finding:
    """Judge the files that the learner reads at its start."""
    if errors:
        return topics.FILES.failed(
            "; ".join(errors), "correct the path in run.toml or behind --, or copy the files here"
        )
    return topics.FILES.ok("what the learner is started with is there")


MTU_USUAL: Final = 1500


_HINTS: Final = (
    (
        "(connection refused)",
        "start {peer}, which listens when its learner has attached; or correct regions.{peer}.address",
    ),
    ("can't be resolved", "correct the name in regions.{peer}.address, or the resolver of this machine"),
    ("another region or run", "correct regions.{peer}.address: another region answers at {address}"),
    ("signed by another run's authority", "give all regions certificates of one authority: diloco-node certs --help"),
    ("does not trust our certificate", "give all regions certificates of one authority: diloco-node certs --help"),
    ("has expired", "diloco-node certs renew {peer} where ca.key is; copy its folder there, and send SIGHUP"),
    ("is revoked", "diloco-node certs renew REGION where ca.key is; copy its folder to it, and send SIGHUP"),
    ("not valid yet", "set the clocks here and in {peer}"),
    ("does not speak TLS", "correct regions.{peer}.address: something else than diloco-node listens at {address}"),
    ("protocol_version", "install the same version of diloco-node here and in {peer}"),
    ("hello: ", "install the same version of diloco-node here and in {peer}"),
    ("first frame", "correct regions.{peer}.address: something else than diloco-node listens at {address}"),
    ("in quarantine", "mend what the reason says, then in {peer}: diloco-node quarantine lift REGION"),
    ("no hello", "look at {peer}: what listens at {address} hangs, or a firewall between swallows packets"),
    ("", "open {address} for TCP from here, in {peer}'s firewall and on the way"),
)


def peer_refused(peer: str, address: str, error: str) -> Finding:
    """Report that nobody at the address takes our certificate and speaks the protocol."""
    hint = next(hint for phrase, hint in _HINTS if phrase in error)
    text = error if error.startswith(f"{peer} at ") else f"{peer} at {address}: {error}"
    return topics.REACHABLE.failed(text, hint.format(peer=peer, address=address))


def peer_answered(peer: str, address: str, rtt_s: float, role: str) -> Finding:
    """Report a peer that was dialled, took our certificate, and showed that of its name."""
    if role != "training":
        text = f"diloco-node measure of {peer} answers at {address}, not its daemon"
        return topics.REACHABLE.warning(text, f"end it, and start {peer}, when the run is to begin")
    return topics.REACHABLE.ok(f"{peer} answers at {address} in {1e3 * rtt_s:.0f} ms")


def peer_version(peer: str, their_version: int, ours: int) -> Finding:
    """Compare versions of the protocol."""
    if their_version != ours:
        hint = f"install the same version of diloco-node here and in {peer}"
        return topics.VERSION.failed(f"{peer} speaks protocol {their_version}, we speak {ours}", hint)
    return topics.VERSION.ok(f"{peer} speaks protocol {their_version}, as we do")


def peer_link(peer: Mapping[str, Any]) -> Finding:
    """Judge the link as our own daemon has it, in an entry of the status document's `peers`."""
    name, link, address = str(peer.get("name")), str(peer.get("link")), peer.get("address")
    if link == "up":
        return topics.LINK.ok(f"the link to {name} is up")
    error = str(peer.get("error") or "no reason yet")
    hint = f"either side must be able to dial the other: run diloco-node doctor in {name} as well"
    where = f" ({address})" if address else ", which must dial us,"
    return topics.LINK.failed(f"the link to {name}{where} is {link}: {error}", hint)


def path_mtu(peer: str, mtu: int, *, is_through: bool, sent_bytes: int) -> Finding:
    """Judge whether full packets come through, when nobody may split them."""
    size = min(mtu, sent_bytes)
    if not is_through:
        hint = "lower the MTU of this machine's interface (ip link set dev eth0 mtu 1400), or let ICMP through"
        return topics.MTU.failed(
            f"packets of {size} bytes do not reach {peer}: {sent_bytes} bytes sent, not acknowledged", hint
        )
    note = " (a tunnel on the way)" if mtu < MTU_USUAL else ""
    return topics.MTU.ok(f"packets of {size} bytes reach {peer} whole{note}")


def daemon(region: str, status: Mapping[str, Any] | None) -> Finding:
    """Report what our own daemon does."""
    if status is None:
        return topics.DAEMON.unknown(f"no daemon of {region} answers here, so nothing is known about links that are up")
    return topics.DAEMON.ok(
        f"{region} is {status.get('role', status.get('state', 'starting'))}: {status.get('reason', '')}"
    )


def alert(alert: Finding) -> Finding:
    """Report an alert of our daemon; one that is good to know needs no remedy."""
    text = f"{alert.code} {alert.text}".strip()
    if alert.mark is Mark.INFO:
        return topics.ALERT.ok(text)
    hint = alert.hint or "diloco-node status shows more"
    return replace(alert, code=topics.ALERT.check, text=text, regions=(), hint=hint)
