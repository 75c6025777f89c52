"""The output of `status`: health, how far the run is, a row for each region, alerts and open rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from diloco_node.cli.tables import COLUMNS, finding_lines, region_cells, region_lines, role_of, since, wrap_text
from diloco_node.health.health_summary import joint_alerts, joint_health
from diloco_node.health.reading import duration, number, rows, section, text

SEEN: Final = "*"
"""Mark of a region that was not asked: its row is as another region knows it."""

ALERTS_MAX: Final = 8


def status_lines(documents: Sequence[dict[str, Any]], width: int | None) -> list[str]:
    """Lay out everything as lines, of documents as `admin_client.ask` returns them. width: None: no line is wrapped."""
    table, seen_from = table_rows(documents)
    summary = (text(joint_health(documents), "line"), run_line(documents), held_out_line(documents))
    lines = [row for line in summary for row in wrap_text(line, width)]
    lines += region_lines(table, width)
    if seen_from:
        lines += wrap_text(f"{SEEN} as seen from {seen_from}", width)
    lines += [row for line in member_lines(documents) for row in wrap_text(line, width)]
    lines += alert_lines(documents, width)
    return lines + [line for document in documents for line in detail_lines(document, width)]


def run_line(documents: Sequence[dict[str, Any]]) -> str:
    """Describe the run, how far it is, and when it ends; empty while no region knows."""
    run = max(
        (section(document, "run") for document in documents), key=lambda run: number(run, "step") or 0.0, default={}
    )
    if not run:
        names = sorted({text(document, "run_id") for document in documents} - {""})
        return f"run {', '.join(names)}" if names else ""
    facts = [f"run {text(run, 'id')}: step {_of(run, 'step', 'total_steps')}"]
    facts.append(f"{_of(run, 'tokens', 'tokens_total')} tokens merged")
    left_s = number(run, "eta_seconds")
    if left_s:
        facts.append(f"{duration(left_s)} left")
    return ", ".join(facts)


def held_out_line(documents: Sequence[dict[str, Any]]) -> str:
    """Show each region's last evaluations with their steps; empty while no region has made one."""
    facts = []
    for document in documents:
        learner = section(document, "learner")
        for key, model in (("val_loss", "own"), ("val_loss_global", "merged")):
            loss, step = number(learner, key), number(learner, f"{key}_step")
            if loss is not None:
                place = "" if step is None else f" at step {step:,.0f}"
                facts.append(f"{text(document, 'region')} {model} {loss:.3f}{place}")
    return f"held-out loss: {', '.join(facts)}" if facts else ""


def _of(run: Any, key: str, total_key: str) -> str:
    total = number(run, total_key)
    return f"{number(run, key) or 0:,.0f}" + (f" of {total:,.0f}" if total else "")


def table_rows(documents: Sequence[dict[str, Any]]) -> tuple[list[list[str]], str]:
    """Make a row of COLUMNS for each region of the run, also for one that did not answer; name the one that saw the
    others."""
    cells = [
        [document["region"], "down", *[""] * (len(COLUMNS) - 3), document["error"]]
        if "error" in document
        else region_cells(document["region"], document)
        for document in documents
    ]
    names = {document["region"] for document in documents}
    # The one that has applied most knows most.
    witnesses = [document for document in documents if rows(document, "peers")]
    witness = max(witnesses, key=lambda document: number(document, "applied_index") or 0.0, default=None)
    if witness is None:
        return cells, ""
    peers = [peer for peer in rows(witness, "peers") if text(peer, "name") not in names]
    cells += [_peer_cells(dict(peer), witness) for peer in peers]
    return cells, text(witness, "region") if peers else ""


def member_lines(documents: Sequence[dict[str, Any]]) -> list[str]:
    """Say what the run bears, what the witness does, and what each member without a vote that counts waits for.

    A region that answers knows best what it waits for; of the others the region that has applied most.
    """
    tellers = [document for document in documents if section(document, "members")]
    teller = max(tellers, key=lambda document: number(document, "applied_index") or 0.0, default={})
    own = {
        text(document, "region"): row
        for document in tellers
        for row in rows(section(document, "members"), "rows")
        if text(row, "region") == text(document, "region")
    }
    is_over = text(teller, "state") == "finished"
    tolerance = "" if is_over else text(section(teller, "members"), "tolerance")
    lines = [f"members: {tolerance}"] if tolerance else []
    for row in rows(section(teller, "members"), "rows"):
        kind, name, has_vote = text(row, "kind"), text(row, "region"), row.get("has_folder") is not False
        if kind == "witness" or (
            number(row, "since") and (kind == "contributor" or (kind == "voter" and not has_vote))
        ):
            state = text(own.get(name, row), "state")
            lines.append(f"{name}: {kind} since {since(row)}" + (f"; {state}" if state else ""))
    return lines


def _peer_cells(peer: dict[str, Any], witness: dict[str, Any]) -> list[str]:
    name = text(peer, "name")
    is_alive = peer.get("is_alive") is True
    gone = "left" if peer.get("has_left") is True else "down"
    role = gone if not is_alive else "leader" if witness.get("leader") == name else role_of(witness, name, "follower")
    steps = number(section(witness, "steps_of"), name)
    facts = []
    if is_alive and number(peer, "rtt_seconds") is not None:
        facts.append(f"{1000 * (number(peer, 'rtt_seconds') or 0):.0f} ms away")
    applied_index = number(peer, "applied_index")  # 0: nothing was heard of it yet
    behind = (number(witness, "applied_index") or 0) - applied_index if applied_index else 0
    if behind > 0:
        facts.append(f"{behind:.0f} ledger entries behind")
    # It counts rounds while there was a learner: of one that is gone it would say that all was well.
    part_in = number(section(witness, "participation_of"), name)
    if part_in is not None and is_alive and number(peer, "step") is not None:
        facts.append(f"in {100 * part_in:.0f} % of the merges")
    if text(peer, "error") and text(peer, "link") != "up":
        facts.append(text(peer, "error"))
    cells = {"region": name + SEEN, "role": role, "step": "-" if steps is None else f"{steps:.0f}"}
    cells["now"] = ", ".join(facts)
    return [cells.get(column, "-") for column in COLUMNS]


def alert_lines(documents: Sequence[dict[str, Any]], width: int | None) -> list[str]:
    """Show each alert of all regions once, the worst first, with what helps."""
    alerts = joint_alerts(documents)
    lines = [line for alert in alerts[:ALERTS_MAX] for line in finding_lines(alert, width)]
    if len(alerts) > ALERTS_MAX:
        lines += wrap_text(f"{len(alerts) - ALERTS_MAX} more alerts: `diloco-node status --json`", width)
    return lines


def detail_lines(document: dict[str, Any], width: int | None) -> list[str]:
    """Show what a row has no room for: each open round and what it waits for, what an end of the learner would lose or
    lost, and the last alarm."""
    region = document["region"]
    lines = []
    for entry in rows(document, "rounds"):
        round_ = f"fragment {entry.get('fragment', '?')} to version {entry.get('version', '?')}"
        ballot = f" (ballot {entry['ballot']})" if entry.get("ballot") else ""
        lines.append(f"{region}: {round_}{ballot}: {entry.get('reason') or 'open'}")
    at_stake = section(section(document, "learner"), "at_stake")
    losses = {
        "an end of the learner would lose": at_stake if any(at_stake.values()) else {},
        "the learner's last end lost": section(section(document, "learner_process"), "lost"),
    }
    for words, steps in losses.items():
        if steps:
            unsaved, unmerged = (number(steps, key) or 0.0 for key in ("unsaved_steps", "unmerged_steps"))
            lines.append(
                f"{region}: {words} {unmerged:.0f} steps that no merge includes, and moments of {unsaved:.0f} steps"
            )
    alarms = [note for note in rows(document, "notes") if note.get("is_alarm")]
    if alarms:
        count = document.get("alarms", len(alarms))
        words = "1 alarm" if count == 1 else f"{count} alarms, the last"
        lines.append(f"{region}: {words}: {alarms[-1].get('text', '')}")
    return [row for line in lines for row in wrap_text(line, width)]
