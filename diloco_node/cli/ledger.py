"""`diloco-node ledger`: the entries of a region's ledger, for people and as JSON, also while its daemon writes them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from diloco_node.cli.options import ConfigOption
from diloco_node.cli.places import RegionArgument, region_folder
from diloco_node.errors import StorageError
from diloco_node.escaping import escaped
from diloco_node.state_names import LEDGER_NAME

if TYPE_CHECKING:
    from diloco_node.core.types import Entry, EntryBody, LedgerBase, RoundBody
    from diloco_node.storage.ledger_reader import LedgerReader

PERIOD_S: Final = 0.5
"""Time between two reads of the file with --follow."""

DIGEST_CHARACTERS: Final = 12
"""Length of a digest that people read."""


def ledger(
    *,
    place: RegionArgument = None,
    config: ConfigOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is appended, until Ctrl-C.")] = False,
    first: Annotated[int, typer.Option("--from", metavar="N", min=1, help="Begin with this entry.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object per line.")] = False,
) -> None:
    """Print the entries of a region's ledger. Nothing is changed, and a daemon may run on it.

    An entry at the end may not be committed yet. If another leader's entry takes its place, that is printed, too.
    """
    from diloco_node.storage.ledger_reader import LedgerReader

    reader = LedgerReader(region_folder(place, config, file=LEDGER_NAME))
    last_index = -1
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            entries = _read(reader, may_be_changing=last_index >= 0)
            if reader.base.index > max(last_index, first - 1):
                typer.echo(base_line(reader.base, as_json=as_json))
            for entry in (entry for entry in entries if entry.index >= first):
                typer.echo(entry_line(entry, as_json=as_json))
            last_index = max(last_index, reader.base.index + len(reader.entries))
            if not follow:
                if last_index < first:
                    typer.echo(f"the last entry here is #{last_index}: none from #{first} on", err=True)
                return
            time.sleep(PERIOD_S)


def _read(reader: LedgerReader, *, may_be_changing: bool) -> tuple[Entry, ...]:
    """Read new entries. A file that was whole before and is not now is being written: it is read once more."""
    try:
        return reader.read()
    except StorageError:
        if not may_be_changing:
            raise
        time.sleep(PERIOD_S)
        return reader.read()


def base_line(base: LedgerBase, *, as_json: bool) -> str:
    """Describe the base, which stands for the entries that are summed up."""
    if as_json:
        return json.dumps({"index": base.index, "term": base.term, "kind": "base", "hash": base.hash.hex()})
    return f"#{base.index} term {base.term} base: entries up to here are summed up, hash {_short(base.hash)}"


def entry_line(entry: Entry, *, as_json: bool) -> str:
    """Describe an entry. Its words may be another region's."""
    if as_json:
        return json.dumps(as_document(entry), default=bytes.hex)
    return escaped(f"#{entry.index} term {entry.term} {kind_of(entry)}: {_body_words(entry)}")


def as_document(entry: Entry) -> dict[str, Any]:
    """Describe an entry: fields of its body by name; its bytes are for `json.dumps(default=bytes.hex)`."""
    place = {"index": entry.index, "term": entry.term, "kind": kind_of(entry)}
    return {**place, "body": dataclasses.asdict(entry.body), "previous": entry.previous, "hash": entry.hash}


def kind_of(entry: Entry) -> str:
    """Name the kind of an entry, as in docs/formats.md."""
    from diloco_node.core.ledger.entries import body_kind

    return body_kind(entry.body)


def _body_words(entry: Entry) -> str:
    from diloco_node.core import types

    match entry.body:
        case types.GenesisBody() as body:
            digests = (
                f"settings {body.settings_digest[:DIGEST_CHARACTERS]}, model {body.manifest_digest[:DIGEST_CHARACTERS]}"
            )
            words = f"run {body.run_id} of {', '.join(body.regions)}, {len(body.fragment_digests)} fragments, {digests}"
        case types.LeaderBody() as body:
            words = body.leader
        case types.RoundBody() as body:
            words = _round_words(body)
        case types.DiscardedBody() as body:
            round_ = f"steps {body.step_from} to {body.step_to} of {body.learner} incarnation {body.incarnation}"
            words = f"fragment {body.fragment}: {round_}, {body.tokens:,} tokens: {body.reason}"
        case types.FinishedBody() as body:
            words = f"versions {min(body.versions)} to {max(body.versions)}: {body.reason}"
        case types.ExtendedBody() as body:
            words = f"goes on to {body.steps_max or 'any number of'} steps, {body.tokens_max or 'any number of'} tokens"
        case types.SnapshotBody() as body:
            words = f"fragment {body.fragment} version {body.version} is {_short(body.digest)}"
        case types.SummaryBody() as body:
            words = f"entries up to {body.index} are {_short(body.digest)}"
        case body:
            words = _change_words(body)
    return words


def _change_words(change: EntryBody) -> str:
    """Describe an entry that an operator ordered, or the leader where a region's folder is another one."""
    from diloco_node.config.setting_texts import setting_texts
    from diloco_node.core import types
    from diloco_node.core.member_kind import MemberKind, MembershipBody
    from diloco_node.core.settings_body import SettingsBody

    words = ""
    match change:
        case types.DiskNamedBody() as body:
            disk = f"folder {_short(body.disk)}" if body.disk else "no folder that counts"
            states = {types.EXPELLED: "is expelled", types.EVICTED: "was away for long, and has no vote"}
            words = f"{body.region} {states.get(body.disk, f'has {disk}')}"
        case types.RevokedBody() as body:
            words = f"certificate {_short(body.certificate)} of {body.region}"
        case MembershipBody() as body:
            place = f" at {body.address}" if body.address else ""
            words = f"{body.region} is a {body.kind}{' member' * (body.kind == MemberKind.FORMER)}{place}"
        case SettingsBody() as body:
            words = ", ".join(f"{key} {text}" for key, text in setting_texts(body).items())
    return words


def _round_words(body: RoundBody) -> str:
    total = sum(member.weight for member in body.members) or 1.0
    members = ", ".join(
        f"{member.contribution.learner} {member.weight / total:.1%} ({member.contribution.tokens:,} tokens)"
        for member in body.members
    )
    last = ", the last one" if body.is_last else ""
    round_ = f"fragment {body.fragment} to version {body.version} (ballot {body.ballot}){last}"
    return f"{round_}: {members}; share {body.share:.3g}, payload {_short(body.payload_digest)}"


def _short(digest: bytes) -> str:
    return digest.hex()[:DIGEST_CHARACTERS]
