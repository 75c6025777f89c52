"""`diloco-node start --join`: a region with a certificate and one member's address learns the run, and writes run.toml.

Nothing that the member shows is taken on trust: each setting is one of those that all regions share, is checked as if
it stood in run.toml, and their digest must be the run's.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from diloco_node.atomic_file import replace_file
from diloco_node.cli.init import admin_ports
from diloco_node.cli.options import CONFIG_NAME, load, load_text, parse_option
from diloco_node.errors import ConfigError, IdentityError, PeerError, PeersUnreachable, StorageError
from diloco_node.escaping import escaped

if TYPE_CHECKING:
    from diloco_node.config.resolve import NodeConfig
    from diloco_node.transport.asking import PeerAnswer
    from diloco_node.transport.certificates import Identity
    from diloco_node.wire.run_shown import RunShown

TIMEOUT_S: Final = 5.0
POLL_S: Final = 2.0
"""Between two looks at whether the region is listed."""

PATIENCE_S: Final = 60.0
"""So long nobody may answer at first: a member that is being started again does then."""

USUAL_PORT: Final = 7400
UNLISTED: Final = "unlisted.invalid:7400"
"""For a region that no list has yet, and whose address only that will tell."""

PATH_SETTINGS: Final = frozenset({"run.state_dir", "run.certs_dir"})

_HF_NAMES: Final = (
    "learning_rate lr_scheduler_type warmup_steps warmup_ratio weight_decay max_grad_norm optim adam_beta1 adam_beta2 "
    "adam_epsilon label_smoothing_factor bf16 fp16 seed eval_steps per_device_train_batch_size "
    "per_device_eval_batch_size gradient_accumulation_steps gradient_checkpointing"
)
HF_ARGS: Final = frozenset(_HF_NAMES.split())
"""Arguments of a Hugging Face model's training that are taken from a member: what is learned and how. Others name
places, accounts and programs."""

Flags = Mapping[str, tuple[str, Any]]
Sections = dict[str, dict[str, str]]
"""By table of run.toml: by name a value as it is written there."""


def join_run(
    region: str,
    address: str,
    config: Path | None,
    flags: Flags,
    assignments: Sequence[str] | None = None,
    *,
    check: Callable[[NodeConfig], None] = lambda _: None,
) -> None:
    """Write the run.toml with which this region starts, once it is listed; waits for that.

    Where an earlier call has written it, only the number of changes is asked again, and only by an empty state folder:
    the region may have been removed and added again since.

    region: this one. address: of any member, "host:port". flags, assignments: as for `load`; they are written, too.
    check: refuses settings with which this machine can't start; asked before anything is waited for, or written.

    Raises ConfigError: what stands in the way here. IdentityError: the certificate. PeersUnreachable: no member of the
    run is there.
    """
    from diloco_node.config.field_types import host_port_of
    from diloco_node.daemon.run_record import read_run_record
    from diloco_node.transport.certificates import load_identity

    parse_option("--join", address, host_port_of)
    path = config if config is not None else Path(CONFIG_NAME)
    state_dir, certs_dir = (Path(flags[f"run.{name}_dir"][1] or path.parent / name) for name in ("state", "certs"))
    if not (certs_dir / region).exists():
        raise IdentityError(
            f"{certs_dir / region} is missing: where the run's ca.key is, `diloco-node certs add {region}` makes it; "
            "copy it here, or name the folder that it is in with --certs"
        )
    identity = load_identity(certs_dir / region, region=region)
    own_address = flags[f"regions.{region}.address"][1]
    if path.exists():
        settings = load(path, flags, assignments)
        _check_written(settings, path, region, identity.run_id)
        if settings.regions[region].joined and read_run_record(settings.state_dir(region)) is None:
            check(settings)
            _count_again(path, certs_dir / region, identity, address, own_address)
        return
    record = read_run_record(state_dir / region)
    if record is not None and record.genesis.run_id != identity.run_id:
        raise ConfigError(
            f"{state_dir / region} holds run {record.genesis.run_id}, the certificate is of run {identity.run_id}: "
            "give another --state-dir"
        )

    def run_toml(peer: str, answer: PeerAnswer) -> str:
        text, settings = _toml(region, address, peer, answer, flags=flags, assignments=assignments)
        check(settings)
        return text

    _write(
        path,
        run_toml(
            *_until_listed(certs_dir / region, identity, address, own_address, patience_s=PATIENCE_S, examine=run_toml)
        ),
    )
    _say(f"{region} is a member of run {identity.run_id}: {path} is written, and the next start needs no --join")


def _count_again(path: Path, folder: Path, identity: Identity, address: str, own_address: str | None) -> None:
    """Write how many changes of the members there were by now; see `_until_listed`."""
    try:
        _, answer = _until_listed(folder, identity, address, own_address, patience_s=0.0)
    except PeersUnreachable as error:
        _say(f"{error}: {identity.region} goes on with {path} as it is")
        return
    assert answer.run is not None
    text = path.read_text()
    if (news := re.sub(r"(?m)^joined *= *\d+", f"joined = {answer.run.changes}", text)) != text:
        _write(path, news)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode(), is_durable=True)
    except OSError as error:
        raise StorageError(
            f"{path} can't be written ({error.strerror or error}): name another with --config"
        ) from error


def _say(text: str) -> None:
    sys.stderr.write(f"diloco-node: {text}\n")


def _check_written(config: NodeConfig, path: Path, region: str, run_id: str) -> None:
    if config.run.id != run_id or region not in config.regions:
        lack = "" if region in config.regions else f", without {region}"
        raise ConfigError(
            f"{path} is there already, of run {config.run.id}{lack}; the certificate is of {region} in run {run_id}: "
            "name another file with --config, for --join writes it"
        )


def _until_listed(
    folder: Path,
    identity: Identity,
    address: str,
    own_address: str | None,
    *,
    patience_s: float,
    examine: Callable[[str, PeerAnswer], object] = lambda *_: None,
) -> tuple[str, PeerAnswer]:
    """Ask the member until it shows this region among the others; the member's name, and its answer.

    own_address: where the others are to dial this region. patience_s: how long nobody may answer at first. examine:
    takes the first answer, before this waits.
    """
    is_told = is_silence_told = False
    end_s = time.monotonic() + patience_s
    while True:
        try:
            peer, own_host, answer = _ask(folder, identity, address)
        except PeersUnreachable as error:
            if not is_told and time.monotonic() >= end_s:
                raise
            if not is_told and not is_silence_told:
                is_silence_told = True
                _say(f"{error}. This tries again for {patience_s:.0f} s")
        else:
            if _is_listed(identity.region, address, own_address, peer, answer.run):
                return peer, answer
            if not is_told and answer.run is not None:
                is_told = True
                examine(peer, answer)
                place = own_address or f"{f'[{own_host}]' if ':' in own_host else own_host}:{USUAL_PORT}"
                _say(_invitation(identity, answer.run.leader or "REGION", place))
        time.sleep(POLL_S)


def _is_listed(region: str, address: str, own_address: str | None, peer: str, run: RunShown | None) -> bool:
    """Whether the member at an address shows this region among the others. Raises ConfigError: it never will so."""
    if run is None:
        raise ConfigError(f"--join {address}: that is no training daemon, but `measure` of {peer}: give its daemon's")
    members = {member.region: member.address for member in run.members}
    if own_address and members.get(region, "") not in ("", own_address):
        raise ConfigError(
            f"--advertise is {own_address}, but {region} was added at {members[region]}: leave it out, or remove the "
            "region and add it again"
        )
    return region in members


def _invitation(identity: Identity, leader: str, place: str) -> str:
    return (
        f"{identity.region} is no member of run {identity.run_id} yet: where {leader} leads, and with the "
        f"authority's key, `diloco-node members add {identity.region} {leader} --address {place} --ca-key "
        "ca.key`. This waits for it"
    )


def _ask(folder: Path, identity: Identity, address: str) -> tuple[str, str, PeerAnswer]:
    """The name of the member at an address, our own host on the way to it, and its answer."""
    from diloco_node.transport.asking import ask_peer, region_at
    from diloco_node.wire.envelope import LinkRole

    try:
        peer, own_host = region_at(folder, identity, address, timeout_s=TIMEOUT_S)
        if peer == identity.region:
            raise ConfigError(f"--join {address}: {peer} itself runs there already; give the address of another member")
        answer = ask_peer(identity, peer, address, timeout_s=TIMEOUT_S, role=LinkRole.JOINING)
        return peer, own_host, asyncio.run(answer)
    except PeerError as error:
        refusal = IdentityError if "certificate" in str(error) else PeersUnreachable
        raise refusal(f"--join {address}: {escaped(str(error))}") from None


def _toml(
    region: str, address: str, peer: str, answer: PeerAnswer, *, flags: Flags, assignments: Sequence[str] | None
) -> tuple[str, NodeConfig]:
    """The run.toml of this region, which may not be listed yet, and what is set by it and the flags."""
    from diloco_node.wire.envelope import settings_difference

    run = answer.run
    assert run is not None
    sections = _shown_sections(peer, run, {text.partition("=")[0].strip() for text in assignments or ()})
    addresses = {member.region: member.address or None for member in run.members if member.region != region}
    place = next((member.address for member in run.members if member.region == region), UNLISTED)
    for name, host_port in addresses.items():
        sections[f"regions.{name}"] = {} if host_port is None else {"address": json.dumps(host_port)}
    sections[f"regions.{region}"] = {
        **({"address": json.dumps(place)} if place else {}),
        "joined": str(run.changes),
        "admin_port": str(admin_ports({**addresses, region: place or None})[region]),
    }
    config = load_text(_text(sections, ""), f"as {peer} shows it, ", flags, assignments)
    _check_shared(config, peer, run)
    for key, value, origin in config.rows():
        if origin.startswith("--") and key != "run.init":
            section, _, name = key.rpartition(".")
            sections[section][name] = _absolute(key, value)
    if config.settings_digest() != answer.hello.settings_digest:
        ours = [f"{key}={value}" for key, value in config.shared_settings().items()]
        difference = settings_difference(ours, answer.hello.settings) or "their digests differ"
        raise ConfigError(f"{peer} runs with other settings than it shows, or another version: {difference}")
    return _text(sections, f"# Written by diloco-node start --join {address}: the run as {peer} showed it.\n"), config


def _check_shared(config: NodeConfig, peer: str, run: RunShown) -> None:
    """Refuse a flag or variable of this machine by which its setting is another one than the run's."""
    run_texts = dict(line.split("=", 1) for line in run.settings)
    sections = {"rounds": config.rounds, "run": config.run}
    for table, section in sections.items():
        fields = type(section).model_fields.items()
        defaults = {name: field.get_default() for name, field in fields if f"{table}.{name}" not in run_texts}
        sections[table] = section.model_copy(update=defaults)
    run_texts = config.model_copy(update=sections).shared_settings() | run_texts
    for key, text in config.shared_settings().items():
        if config.origin(key).startswith(("-", "DILOCO_")) and text != run_texts[key]:
            raise ConfigError(
                f"{key} is {text} ({config.origin(key)}), but {run_texts[key]} in the run, as {peer} shows it: leave "
                f"it out. `diloco-node config set {key}={text}` changes it in all regions, if it can change in a run"
            )


def _shown_sections(peer: str, run: RunShown, own_keys: Collection[str]) -> Sections:
    """The settings that a member shows, but for those that this start sets itself.

    Raises ConfigError: one is none that regions share, no single value, or of use to that member alone.
    """
    from diloco_node.config.resolve import is_joiner_setting

    sections: Sections = defaultdict(dict)
    for line in run.settings:
        key, _, value = line.partition("=")
        try:
            document = tomllib.loads(f"value = {value}")
            is_value = document.keys() == {"value"} and len(value.splitlines()) == 1
        except (ValueError, RecursionError):
            is_value = False
        if not is_value or not is_joiner_setting(key):
            raise ConfigError(
                f"{peer} shows {escaped(line[:80])}, which is no setting that regions share: install its version"
            )
        if key in own_keys:
            continue
        section, _, name = key.partition(".")
        sections[section][name] = _harmless(peer, key, document["value"])
    return sections


def _harmless(peer: str, key: str, value: Any) -> str:
    """A member's value as run.toml gets it, without what may name a place or a program on this machine."""
    from diloco_node.config.setting_texts import toml_text

    if key == "model.hf" and isinstance(value, str) and value.startswith(("/", "~", ".")):
        raise ConfigError(f"model.hf is a folder of {peer}: bring it here, and add --set model.hf=FOLDER")
    if key != "model.hf_args" or not isinstance(value, dict):
        return toml_text(value)
    arguments = {name: item for name, item in value.items() if name in HF_ARGS and isinstance(item, str | int | float)}
    if strange := sorted(value.keys() - arguments.keys()):
        _say(f"model.hf_args of {peer} is taken without {escaped(', '.join(strange))}: add what you want with --set")
    return toml_text(arguments)


def _absolute(key: str, value: str) -> str:
    """A flag's value as it is written: a path is taken from the folder of the command, not from that of run.toml."""
    from diloco_node.config.sources import HUB

    if key in PATH_SETTINGS:
        return json.dumps(str(Path(json.loads(value)).absolute()))
    if key == "data.paths":
        return json.dumps([path if path.startswith(HUB) else str(Path(path).absolute()) for path in json.loads(value)])
    return value


def _text(sections: Sections, head: str) -> str:
    tables = (
        "\n".join([f"[{table}]", *(f"{name} = {value}" for name, value in rows.items())])
        for table, rows in sections.items()
    )
    return head + "\n\n".join(tables) + "\n"
