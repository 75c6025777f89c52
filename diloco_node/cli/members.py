"""`diloco-node members`: the regions of a run, and changes of them that the holder of the authority's key signs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from diloco_node.cli.options import ConfigOption, has_config, load, parse_option
from diloco_node.cli.orders import give_order
from diloco_node.cli.places import RegionArgument, region_folder
from diloco_node.cli.tables import since, table_lines
from diloco_node.errors import ConfigError, PeersUnreachable
from diloco_node.state_names import NODE_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco_node.daemon.spec import NodeSpec
    from diloco_node.transport.certificates import Identity

PEER_S: Final = 5.0
"""Seconds for which a region may take to answer."""

app = typer.Typer(help="The regions of a running run.", no_args_is_help=True, rich_markup_mode=None)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A region of the run.")]
KeyOption = Annotated[
    Path | None,
    typer.Option("--ca-key", metavar="FILE", help="The authority's key; default: ca.key in run.toml's run.certs_dir."),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Also where the next failure would stop merging then.", show_default=False)
]


@app.command("list")
def list_members(
    *,
    place: RegionArgument = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show the members, the entry of the ledger that made each what it is, and how many may be away."""
    folder = region_folder(place, config)
    members = _members(folder)[1]
    if as_json:
        typer.echo(json.dumps(members))
        return
    rows = [(row["region"], row["kind"], since(row), row["state"]) for row in members["rows"]]
    typer.echo("\n".join(table_lines([(name, "left") for name in ("region", "kind", "since", "now")], rows)))
    typer.echo(members["tolerance"])


@app.command()
def add(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A region that has a certificate: `certs add NAME`.")],
    place: RegionArgument = None,
    address: Annotated[
        str, typer.Option("--address", metavar="HOST:PORT", help="Where the others dial it; without, it dials them.")
    ] = "",
    key: KeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Add a region to the run. It trains as a contributor, which changes no majority; `promote` gives it a vote."""
    from diloco_node.config.field_types import host_port_of
    from diloco_node.core.shapes import REGION_NAMES, is_region_name

    if not is_region_name(name):
        raise ConfigError(f"{name!r} is no region's name: use {REGION_NAMES}")
    if address:
        parse_option("--address", address, host_port_of)
    _change(name, "contributor", place, config, key, address=address)
    typer.echo(f"Then, in {name}: diloco-node start --join HOST:PORT --region {name}, with the address of any member")


@app.command()
def witness(
    *,
    url: Annotated[str, typer.Argument(metavar="URL", help="An empty place in a bucket: s3://BUCKET/PREFIX.")],
    place: RegionArgument = None,
    key: KeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Give two regions a witness in a bucket: either goes on alone while the other is away. `remove` takes it back."""
    from diloco_node.core.ledger.witness import RECORD_BYTES_MAX
    from diloco_node.core.member_kind import WITNESS_NAME
    from diloco_node.storage.object_store import bucket_scheme
    from diloco_node.storage.swapped_object import FOLDER, RECORD, SwappedObject

    rows = _members(region_folder(place, config))[1]["rows"]
    if bucket_url := next((row["address"] for row in rows if row["kind"] == "witness"), ""):
        raise ConfigError(
            f"the run has its witness at {bucket_url}: for another one, `members remove {WITNESS_NAME}` first"
        )
    bucket = SwappedObject(url, bucket_scheme(url))
    bucket.check(FOLDER)
    if bucket.read_tagged(RECORD, RECORD_BYTES_MAX) is not None:
        raise ConfigError(
            f"{url} holds the record of a witness: name another place, or remove {RECORD} there, if no run counts on it"
        )
    _change(WITNESS_NAME, "witness", place, config, key, address=url)


@app.command()
def remove(
    *,
    name: NameArgument,
    place: RegionArgument = None,
    key: KeyOption = None,
    is_forced: ForceOption = False,
    config: ConfigOption = None,
) -> None:
    """Remove a region from the run, whether it is there or not. It stops, and the others close their links with it."""
    _change(name, "former", place, config, key, is_forced=is_forced)


@app.command()
def promote(
    *, name: NameArgument, place: RegionArgument = None, key: KeyOption = None, config: ConfigOption = None
) -> None:
    """Give a contributor a vote."""
    _change(name, "voter", place, config, key)


@app.command()
def demote(
    *,
    name: NameArgument,
    place: RegionArgument = None,
    key: KeyOption = None,
    is_forced: ForceOption = False,
    config: ConfigOption = None,
) -> None:
    """Take a region's vote: it trains on as a contributor, and counts for no majority."""
    _change(name, "contributor", place, config, key, is_forced=is_forced)


@app.command()
def recover(
    *,
    place: RegionArgument = None,
    key: KeyOption = None,
    is_forced: Annotated[
        bool, typer.Option("--force", help="Do it; without it, only say what would be done.", show_default=False)
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Go on with one region alone, after a majority of the voters is lost for good. All others leave the run."""
    from diloco_node.daemon.lone_region import go_on_alone, look_alone
    from diloco_node.daemon.spec import NodeSpec
    from diloco_node.transport.authority import sign
    from diloco_node.transport.certificates import load_identity

    folder = region_folder(place, config, file=NODE_NAME)
    spec = NodeSpec.load(folder / NODE_NAME)
    facts = look_alone(folder, spec.region)
    if not is_forced:
        loss = f": {facts.loss}" if facts.loss else ""
        raise ConfigError(
            f"{spec.region} goes on alone from entry {facts.index}; {', '.join(facts.leavers)} leave the run, and what "
            f"they committed without it is lost{loss}. Stop every region that is there, then give the command again "
            f"with --force. If a majority of {', '.join(facts.voters)} can come back, start those instead"
        )
    identity = load_identity(spec.identity_dir, region=spec.region, run_id=spec.run_id)
    key = _key(key, config)
    if fault := identity.signature_fault(spec.run_id.encode(), sign(key, spec.run_id.encode())):
        raise ConfigError(f"{key}: {fault}")
    _check_silence(spec, identity, {name: facts.addresses[name] or spec.peers.get(name) for name in facts.leavers})
    facts = go_on_alone(folder, spec.region, spec.run_id, lambda statement: sign(key, statement))
    typer.echo(
        f"{spec.region} goes on alone from entry {facts.index}: start it. {', '.join(facts.leavers)} left the run. A "
        "region comes back with an empty folder, after `diloco-node members add`"
    )


def _check_silence(spec: NodeSpec, identity: Identity, addresses: Mapping[str, str | None]) -> None:
    """Refuse to go on alone while another region is there, also one that does not let us in. Raises ConfigError."""
    from concurrent.futures import ThreadPoolExecutor

    from diloco_node.errors import LinkLost, PeerCertificateRefused
    from diloco_node.transport.asking import region_at

    def is_there(address: str) -> bool:
        try:
            region_at(spec.identity_dir, identity, address, timeout_s=PEER_S)
        except PeerCertificateRefused:
            return True  # of another authority than the one that is known here: perhaps of a newer one
        except LinkLost:
            return False
        return True

    places = {name: address for name, address in addresses.items() if address}
    with ThreadPoolExecutor() as threads:
        answers = dict(zip(places, threads.map(is_there, places.values()), strict=True))
    if there := [f"{name} at {places[name]}" for name, is_here in answers.items() if is_here]:
        raise ConfigError(
            f"{', '.join(there)} answers: start {spec.region} beside it, or stop it first, if a majority is lost for "
            "good"
        )


def _change(
    name: str,
    kind: str,
    place: str | None,
    config: Path | None,
    key: Path | None,
    *,
    is_forced: bool = False,
    address: str | None = None,
) -> None:
    folder = region_folder(place, config)
    key = _key(key, config)
    voters = change_members(folder, name, kind, key, is_forced=is_forced, address=address)
    fact = "is removed" if kind == "former" else f"is a {kind}"
    typer.echo(
        f"{folder.name} puts it into the ledger: {name} {fact} when a majority agrees. The voters are "
        f"{', '.join(voters)} then; `diloco-node members list` shows them"
    )


def _key(key: Path | None, config: Path | None) -> Path:
    from diloco_node.transport.certificates import CA_KEY

    if key is None and not has_config(config):
        raise ConfigError(f"there is no run.toml here that names the authority's folder: give --ca-key {CA_KEY}")
    return key if key is not None else load(config).run.certs_dir / CA_KEY


def change_members(
    folder: Path, name: str, kind: str, key: Path, *, is_forced: bool = False, address: str | None = None
) -> tuple[str, ...]:
    """Sign a change of the members, give it to the region with this state folder, and return the voters after it.

    address: of a region that is added; None: it must be a member already. is_forced: also where the next failure would
    stop merging then.

    Raises DilocoError: the region does not answer, or refuses; or the key or the member is not there.
    """
    from diloco_node.core.ledger.roster import Roster
    from diloco_node.core.member_kind import WITNESS_NAME, MemberKind, Membership, MembershipBody
    from diloco_node.transport.authority import sign

    run_id, members = _members(folder)
    lines = [
        Membership(row["region"], MemberKind(row["kind"]).value, address=row["address"]) for row in members["rows"]
    ]
    before = Roster(lines, members["changes"])
    if address is None and before.kind_of(name) is MemberKind.FORMER:
        names = ", ".join(before.disks)
        verb = "witness URL" if name == WITNESS_NAME else "add"
        remedy = "nothing is to be removed" if kind == MemberKind.FORMER else f"`members {verb}` makes it one"
        raise ConfigError(f"{name} is no member of the run, which has {names}: {remedy}")
    roster = before.changed(MembershipBody(name, kind, address or ""))
    signature = sign(key, roster.statement(run_id)).hex()
    order = {"region": name, "kind": kind, "address": address, "changes": roster.changes}
    give_order(folder, "members", {**order, "signature": signature, "force": is_forced})
    return roster.voters


def _members(folder: Path) -> tuple[str, dict[str, Any]]:
    from diloco_node.cli.admin_client import ask_in
    from diloco_node.cli.existing_state import no_daemon

    document = ask_in(folder)
    members = document.get("members")
    if "error" in document:
        raise no_daemon(folder, document["error"])
    if not isinstance(members, dict):
        reason = document.get("reason") or "it has just started"
        raise PeersUnreachable(
            f"{folder.name} does not know the members of the run yet: {reason}. Give the command again when "
            f"`diloco-node status {folder.name}` shows that it is a member"
        )
    return str(document["run_id"]), members
