"""State in a region's folder, as commands find it: another run, settings that can't change, a run that is over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_node.config.urls import is_url
from diloco_node.errors import ConfigError, PeersUnreachable
from diloco_node.escaping import escaped, escaped_document
from diloco_node.state_names import FINAL_NAME, NODE_NAME

if TYPE_CHECKING:
    from diloco_node.config.resolve import NodeConfig


def check_begun(config: NodeConfig, region: str) -> tuple[str, list[str]]:
    """Compare run.toml with the run that has begun here, if one has.

    Returns: a line when the run is finished here, and not to go on, else ""; a line for each change with this start.
    Raises ConfigError: another run, a setting that can't change, or an earlier version that can't be had.
    """
    from diloco_node.config.setting_texts import difference_lines
    from diloco_node.core.rounds.extension import extension
    from diloco_node.daemon.run_record import is_complete, read_run_record

    folder = config.state_dir(region)
    record = read_run_record(folder)
    if record is None:
        if config.run.init is not None:
            from diloco_node.daemon.past_run import check_past_init

            check_past_init(config.run.init)
        news = "of two regions neither merges alone (training goes on): use three, or `members witness` later"
        has_joiner = any(section.joined for section in config.regions.values())
        return "", [news] * (len(config.regions) == 2 and not has_joiner)
    # Who joined knows the founders by the ledger: its run.toml has all members of that day.
    founders = [name for name, section in config.regions.items() if not section.joined]
    has_joined = config.regions[region].joined > 0
    record.check(folder, run_id=config.run.id, founders=record.genesis.regions if has_joined else founders)
    lines = _changes(config, folder / NODE_NAME)
    if record.settings is not None:
        unset = [key for key, _, origin in config.rows() if origin == "default"]
        lines += difference_lines(config.shared_settings(), record.settings, unset=unset)
    if extension(record.end, config.run_settings()) is not None:
        words = "was finished and goes on once a majority starts with these limits; the model until now is kept"
        return "", [*lines, f"run {config.run.id} {words}"]
    if not is_complete(folder, record):
        return "", lines
    return f"run {config.run.id} is finished in {region}: {escaped(record.finished or '')}. {_final(folder)}", []


def full_place(init: str | None) -> str | None:
    """`run.init` as it is from any folder: a URL stays as it is."""
    return init if init is None or is_url(init) else str(Path(init).resolve())


def _final(folder: Path) -> str:
    path = folder.resolve() / FINAL_NAME
    if path.exists():
        return (
            f"The model is {path}. To hand the end to a region that lacks it: start --serve. "
            "To go on: more run.steps or run.tokens in run.toml, in all regions, and start"
        )
    return f"{path} is gone. If nobody has moved it: start --serve, here and in another region, writes it again"


def _changes(config: NodeConfig, node_file: Path) -> list[str]:
    from diloco_node.config.schema import FIXED_IN_A_RUN
    from diloco_node.core.settings_body import LEDGER_KEYS
    from diloco_node.daemon.spec import NodeSpec

    try:
        spec = NodeSpec.load(node_file)
        before = dict(line.split("=", 1) for line in spec.shared_settings)
    except (ConfigError, ValueError):
        return []
    init = config.run.init
    if init is not None and (spec.init is None or full_place(init) != full_place(spec.init)):
        raise ConfigError(
            f"run.init is {init} ({config.origin('run.init')}), but run {config.run.id} has begun, and its last start "
            f"had {spec.init or 'none'}: leave it out, or begin a new run with another run.id and run.state_dir"
        )
    lines = []
    for key, now in config.shared_settings().items():
        then = before.get(key, now)
        if then == now or key in LEDGER_KEYS:
            continue
        if key in FIXED_IN_A_RUN:
            raise ConfigError(
                f"{key} is {now} ({config.origin(key)}), run {config.run.id} began with {then}: it can't change in a "
                f"run. Set it back, or begin a new run with another run.id and folder"
            )
        lines.append(f"{key} changes from {then} to {now}: all regions must start with the same value")
    return lines


def finished_status(folder: Path) -> dict[str, Any] | None:
    """The region's last status document, with the end of the run; None: its run is not finished here."""
    from diloco_node.daemon.run_record import REPORT_NAME, is_complete, read_run_record, since_and_model

    record = read_run_record(folder)
    if record is None or not is_complete(folder, record):
        return None
    try:
        report = json.loads((folder / REPORT_NAME).read_bytes())
        document = dict(escaped_document(report)) if report["state"] == "finished" else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        document = {}
    document |= {"region": folder.resolve().name, "run_id": escaped(record.genesis.run_id), "state": "finished"}
    return document | {"reason": f"finished: {escaped(record.finished or '')}{since_and_model(folder)}"}


def no_daemon(folder: Path, cause: str) -> ConfigError | PeersUnreachable:
    """The error for an order to a region that no daemon answers for: its run is finished, or the daemon is down."""
    from diloco_node.core.rounds.extension import WAY_ON

    name = folder.resolve().name
    if (document := finished_status(folder)) is not None:
        return ConfigError(f"{name} takes no orders: its run is over ({document['reason']}): {WAY_ON}")
    return PeersUnreachable(
        f"the daemon of {name} does not run, or does not answer: {cause}. `diloco-node start --region {name}` starts "
        f"it; {folder}/logs/daemon.log says why it ended"
    )
