"""Verdicts about settings, certificates, ports and the learner's files. Pure: facts in, findings out."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, Final

from diloco_node.cli.doctor import topics
from diloco_node.health.alerts import CERTIFICATE_DAYS
from diloco_node.health.finding import Finding

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


def settings_read(path: str, error: str, hint: str) -> Finding:
    """Judge whether run.toml is there and right."""
    return topics.RUN_TOML.failed(error, hint) if error else topics.RUN_TOML.ok(f"{path} is right")


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
