"""Verdicts about what the regions must agree on: run.toml, certificates, ports, the learner's preloads. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, Final

from diloco_node.cli.doctor.finding import CheckResult, Topic

DAYS_WARNING: Final = 30
DIGEST_CHARACTERS: Final = 16
SETTINGS_SHOWN_MAX: Final = 8

COPY_HINT: Final = "copy the region's whole folder from where diloco-node certs init made it"
_CERTIFICATE_HINTS: Final = (
    (" expired on ", "make new ones for all regions (diloco-node certs init --out NEW), unless this clock is wrong"),
    (" is valid from ", "install and start chrony here, and where diloco-node certs init ran"),
    ("can't be read", "give the folder to the user who runs the region (chown), its key with mode 600"),
)

RUN_TOML = Topic("settings", "run-toml")
UNCHANGED = Topic("settings", "settings-changed")
EQUAL = Topic("settings", "settings-equal")
CERTIFICATE = Topic("certificates", "certificate")
EXPIRY = Topic("certificates", "certificate-dates")
KEY_MODE = Topic("certificates", "key-mode")
PORT = Topic("ports", "port")
PRELOAD = Topic("learner", "preload")
FILES = Topic("learner", "learner-files")


def settings_read(path: str, error: str, hint: str) -> CheckResult:
    """Whether run.toml is there and right."""
    return RUN_TOML.failed(error, hint) if error else RUN_TOML.ok(f"{path} is right")


def settings_kept(region: str, started: Mapping[str, Any], now: Mapping[str, Any]) -> CheckResult:
    """What regions must agree on, as this one was started last and as run.toml has it now."""
    changed = differences(started, now)
    if not changed:
        return UNCHANGED.ok(f"{region} was last started with the same [run] and [rounds]")
    hint = "put the old values back, or change them in all regions and start all of them again"
    return UNCHANGED.warning(f"since {region} was started last: {changed}", hint)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Each setting with both values; empty when there is none."""
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    shown = [f"{name} was {old.get(name)!s:.40}, is {new.get(name)!s:.40}" for name in names[:SETTINGS_SHOWN_MAX]]
    return "; ".join(shown) + (f"; {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def settings_equal(peer: str, ours: str, theirs: str, difference: str) -> CheckResult:
    """Digests (hex), as run.toml has it here and as the peer's daemon announces it; difference: what it names."""
    if ours == theirs:
        return EQUAL.ok(f"{peer} has the same settings, {ours[:DIGEST_CHARACTERS]}")
    hint = f"compare diloco-node config show here and in {peer}: [rounds], run.steps and run.tokens must be the same"
    if difference:
        return EQUAL.failed(f"{peer} runs with other settings: {difference}", hint)
    text = f"{peer} runs with other settings: digest {theirs[:DIGEST_CHARACTERS]}, ours {ours[:DIGEST_CHARACTERS]}"
    return EQUAL.failed(text, hint)


def certificate(name: str, error: str) -> CheckResult:
    """Whether it will be accepted. `error`: why not, with the remedy behind a colon; empty when it will."""
    if not error:
        return CERTIFICATE.ok(f"{name}, signed by the run's authority")
    hint = next((hint for part, hint in _CERTIFICATE_HINTS if part in error), COPY_HINT)
    return CERTIFICATE.failed(error, hint)


def certificate_expiry(not_after: dt.datetime, now: dt.datetime) -> CheckResult:
    """How long it is good for."""
    days = (not_after - now).days
    text = f"valid until {not_after:%Y-%m-%d}, {days} days more"
    if days < DAYS_WARNING:
        hint = "make new ones for all regions (diloco-node certs init --out NEW), and start all regions again with them"
        return EXPIRY.warning(text, hint)
    return EXPIRY.ok(text)


def key_mode(path: str, mode: int) -> CheckResult:
    """Who else may read the key."""
    if mode & 0o077:
        return KEY_MODE.warning(f"{path} can be read by others (mode {mode & 0o777:o})", f"chmod 600 {path}")
    return KEY_MODE.ok(f"{path} is for its owner only")


def port(what: str, error: str, is_own: bool) -> CheckResult:
    """Whether it is free, or held by this region's own daemon. `error`: why it can't be bound."""
    if not error:
        return PORT.ok(f"{what} is free")
    if is_own:
        return PORT.ok(f"{what} is held by this region's daemon")
    return PORT.failed(f"{what}: {error}", "see who has it: ss -ltnp; end that, or set another port in run.toml")


def preload(modules: Sequence[str], missing: Mapping[str, str]) -> CheckResult:
    """Modules of `learner.preload`, and why some can't be imported."""
    if missing:
        why = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        hint = (
            "install them in this environment, or take them out of [learner] preload; learners start afresh meanwhile"
        )
        return PRELOAD.failed(f"can't be imported: {why}", hint)
    return PRELOAD.ok(f"{', '.join(modules)} can be imported" if modules else "nothing is preloaded")


def learner_files(errors: Sequence[str]) -> CheckResult:
    """What the learner reads at its start."""
    if errors:
        return FILES.failed("; ".join(errors), "correct the path in run.toml or behind --, or copy the files here")
    return FILES.ok("what the learner is started with is there")
