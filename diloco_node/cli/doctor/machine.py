"""Verdicts about this machine: kernel, disk, memory, clock. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from diloco_node.cli.doctor import topics
from diloco_node.cli.tables import human_bytes
from diloco_node.health.finding import Finding

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
    p99_s = sorted(seconds)[max(0, -(-99 * len(seconds) // 100) - 1)]
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
