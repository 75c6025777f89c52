"""Verdicts about peers, links, packet size and alerts. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from diloco_node.cli.doctor import topics
from diloco_node.health.finding import Finding, Mark

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
