"""The alerts of a region, found in its status document. Kinds are in `alert_kinds`."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from diloco_node.health import alert_kinds as kinds
from diloco_node.health.alert_kinds import AlertKind
from diloco_node.health.critical_path import critical_path
from diloco_node.health.finding import Finding, Mark
from diloco_node.health.reading import Document, duration, human_bytes, number, rows, section, text
from diloco_node.health.tolerance import (
    alive_count,
    failure_tolerance,
    has_majority,
    is_founded,
    majority,
    region_count,
    voter_count,
    voting_count,
)

COMMIT_LATE: Final = 10.0
"""Times the usual time between two commits."""

COMMIT_LATE_MIN_S: Final = 30.0
PAUSE_TIMES: Final = 3.0
PAUSE_MIN_S: Final = 1800.0
"""Without a commit for so many times what is late, and for so long, no evaluation is an excuse."""

SILENT_STEPS: Final = 10.0
"""Times a step: evaluations and checkpoints are pauses, too."""

SILENT_MIN_S: Final = 20.0
FIRST_STEP_S: Final = 600.0
"""A first step may compile."""

STARTING_S: Final = 120.0
"""Regions are started one after the other, and a daemon may compile its kernels for so long."""

REFUSED: Final = "connection refused"
"""As `transport.streams` says of a machine that is there, and on which nothing listens yet."""

LOSS_SHOWN_S: Final = 600.0
"""How long a warning of the learner is shown."""

DISK_LOW_PART: Final = 0.03
STATES_FREE: Final = 2
"""How many times parameters and momentum must fit on the disk."""

STATE_BYTES: Final = 8
"""A parameter and its momentum, float32."""

WAITS_MANY: Final = 4
"""Where more than one round in so many waited for the same region and phase, that is the cause."""

STARVED_LATE_S: Final = 0.5
"""Half of the usual election timeout, and ten times what a loop is late on an idle machine."""

CERTIFICATE_DAYS: Final = 30.0
TOKENS_TOLD: Final = "step(tokens=...) told of "
"""As `learner.token_check` says it."""

_SETTINGS: Final = re.compile(
    r"\b(run_id|founding_digest|settings_digest|manifest_digest): ours |: these settings of run\.toml must be the same"
)
"""As `wire.envelope.check_hello` says it."""

FAILED_PREFIX: Final = "the learner failed: "
"""As `daemon.learner.proxy` says it; after it come the words of the exception."""

_LOSS: Final = re.compile(rf"({FAILED_PREFIX}LearnerError: )?(step \d+: )?the (loss|gradient norm) is ")
"""As `learner.loss_watch` says it. Another error of the script may speak of a loss, too."""

SAME_CHARS: Final = 80
"""An error's words that are looked for in the last line of its process."""

WEIGHT_RATIO_MAX: Final = 2.0
"""Times the share of weight that the steps alone would give; half of `tokens_ratio_max`, if that is more."""

LENGTH_RATIO_MAX: Final = 2.0
"""As `core.merge.outliers.RATIO_MAX`."""

STANDING_ROUNDS: Final = 8
"""Fewer rounds, or cosines, say nothing about a region."""

NEGATIVE_PART: Final = 0.75
"""Part of the last cosines. Where two regions' data say nothing about one another, half of them are negative."""

COSINE_MIN: Final = -0.2
"""Mean of a region's last cosines, all negative: where data differ it is nearer to zero."""

OVER: Final = frozenset({"finished", "finishing"})


def is_closed(document: Document) -> bool:
    """Whether the run's end is committed: the others may go, also while the final model is written here."""
    return text(document, "state") == "finished" or bool(section(document, "end"))


def find_alerts(document: Document) -> list[Finding]:
    """Find all alerts of one region, the worst first; none without a state (a region that is not asked)."""
    if not text(document, "state"):
        return []
    alerts = [
        *_majority(document),
        *_peers(document),
        *_rounds(document),
        *_standings(document),
        *_learner(document),
        *_machine(document),
    ]
    return sorted(alerts, key=lambda alert: tuple(Mark).index(alert.mark))


def starting_peers(document: Document) -> list[str]:
    """Name the peers that may only be starting: not heard since this daemon came, for STARTING_S at most, and nothing
    else stands in the way."""
    up_s = number(document, "up_seconds")
    if up_s is None or up_s > STARTING_S:
        return []
    return [
        text(peer, "name")
        for peer in rows(document, "peers")
        if peer.get("is_alive") is not True
        and _is_unheard(peer)
        and (not text(peer, "error") or REFUSED in text(peer, "error").lower())
    ]


def _is_unheard(peer: Document) -> bool:
    return number(peer, "rtt_seconds") is None and not number(peer, "applied_index")


def cut_off(document: Document) -> Finding:
    """Make the alert that replaces A-NO-MAJORITY of a region when others merge on."""
    share = f"{alive_count(document)} of {region_count(document)} regions"
    return _make(kinds.CUT_OFF, document, f"{text(document, 'region')} hears {share}; the others merge on")


def learner_silence(report_age_s: float | None, step_s: float | None, first_wait_s: float | None = None) -> str:
    """Explain why an attached learner counts as silent; empty if it does not.

    report_age_s: None: it has reported nothing yet. first_wait_s: since it has its parameters; None: it lacks some.
    """
    if report_age_s is None and first_wait_s is not None and first_wait_s > FIRST_STEP_S:
        return (
            f"the learner has reported no step since it attached, and has its parameters for {duration(first_wait_s)}"
        )
    limit_s = max(SILENT_MIN_S, SILENT_STEPS * (step_s or 0.0))
    if report_age_s is None or report_age_s <= limit_s:
        return ""
    return f"the learner has reported no step for {duration(report_age_s)}; a step takes {duration(step_s or 0.0)}"


def _make(kind: AlertKind, document: Document, line: str, *, region: str = "") -> Finding:
    own_region = text(document, "region")
    log = text(section(document, "learner_process"), "log") or f"state/{own_region}/logs/learner.log"
    state = text(document, "state_dir") or f"state/{own_region}"
    values = {"region": region or own_region, "own": own_region, "log": log, "state": state}
    words = {name: shlex.quote(value) for name, value in values.items()}
    hint, command = kind.hint.format(**values), kind.command.format(**words)
    return Finding(kind.mark, kind.code, line, (region or own_region,), hint, command)


def _majority(document: Document) -> Iterator[Finding]:
    if is_closed(document) or text(document, "state") == "starting" or not is_founded(document):
        return
    if starting_peers(document):
        return
    voting, regions = voting_count(document), voter_count(document)
    count = f"{voting} of {regions} regions {'are left' if voting == alive_count(document) else 'can vote'}"
    if not has_majority(document):
        line = f"{count}, {majority(regions)} are needed to merge"
        step, total = number(document, "inner_steps"), number(section(document, "run"), "total_steps")
        if step is not None and total and step >= total:
            line += f". This region alone has made all {total:.0f} steps of the run: the others have probably finished"
        yield _make(kinds.NO_MAJORITY, document, line)
    elif voting < regions and not failure_tolerance(document):
        yield _make(kinds.LAST_MAJORITY, document, f"{count}: the next failure stops merging")


def _peers(document: Document) -> Iterator[Finding]:
    if is_closed(document):
        return  # they may be gone
    quarantine, newcomers = section(document, "quarantine"), starting_peers(document)
    for name in sorted(quarantine):
        line = f"{name} is shut out: {quarantine[name]}"
        yield _make(kinds.QUARANTINE, document, line, region=name)
    for peer in rows(document, "peers"):
        name, error = text(peer, "name"), text(peer, "error")
        is_up = text(peer, "link") == "up" and peer.get("is_alive") is True
        if is_up or name in quarantine or name in newcomers or peer.get("has_left") is True:
            continue
        if "protocol_version: ours" in error:
            yield _make(kinds.VERSION_DIFFERS, document, f"{name}: {error}", region=name)
        elif _SETTINGS.search(error):
            yield _make(kinds.SETTINGS_DIFFER, document, f"{name}: {error}", region=name)
        else:
            where = text(peer, "address") or "no address"
            what = "has not been heard yet" if _is_unheard(peer) else "is down"
            line = f"{name} ({where}) {what}" + (f": {error}" if error else "")
            yield _make(kinds.PEER_DOWN, document, line, region=name)


def _rounds(document: Document) -> Iterator[Finding]:
    if document.get("role") == "leader" and text(document, "state") not in OVER:  # every region knows; once is enough
        stopped = {text(peer, "name") for peer in rows(document, "peers") if peer.get("has_left") is True}
        for entry in (entry for entry in rows(document, "left_out") if text(entry, "region") not in stopped):
            line = f"{text(entry, 'region')} is left out as {text(entry, 'part')}: {text(entry, 'reason')}"
            yield _make(kinds.LEFT_OUT, document, line, region=text(entry, "region"))
    if has_majority(document) and not is_closed(document) and (line := _standstill(document)):
        yield _make(kinds.NO_COMMIT, document, line)
    differences = number(document, "digest_differences")
    if differences:
        line = f"{differences:.0f} digests differed between regions at the same version"
        yield _make(kinds.DIGEST_DIFFERS, document, line)
    for entry in rows(document, "ledger_contradictions"):
        yield _make(kinds.LEDGER_FORKS, document, text(entry, "reason"), region=text(entry, "region"))
    for entry in rows(document, "wrong_leaders"):
        line = f"entries of {text(entry, 'region')} were refused while it led: {text(entry, 'reason')}"
        yield _make(kinds.LEADER_WRONG, document, line, region=text(entry, "region"))
    if text(document, "overbooked"):
        yield _make(kinds.OVERBOOKED, document, text(document, "overbooked"))
    if text(document, "budget_warning"):
        yield _make(kinds.BUDGET_SMALL, document, text(document, "budget_warning"))
    elif document.get("role") == "leader" and (line := _lateness(document)):
        yield _make(kinds.MERGES_LATE, document, line)


def _standstill(document: Document) -> str:
    """Say for how long no round was committed; empty if that is no cause for alarm.

    Scripts evaluate at the same step in all regions: what the own learner pauses says nothing about rounds.
    """
    age_s, usual_s = number(document, "commit_age_seconds"), number(document, "usual_commit_seconds")
    learner = section(document, "learner")
    if age_s is None or usual_s is None:
        return ""
    late_s, pause_age_s = max(COMMIT_LATE_MIN_S, COMMIT_LATE * usual_s), number(learner, "pause_age_seconds")
    is_excused = bool(section(learner, "busy")) or (pause_age_s is not None and pause_age_s <= late_s)
    if age_s <= (max(PAUSE_MIN_S, PAUSE_TIMES * late_s) if is_excused else late_s):
        return ""
    return f"no round was committed for {duration(age_s)}, usually one every {duration(usual_s)}"


def _lateness(document: Document) -> str:
    """Explain why merges are late, from what was measured; empty if they are not, or A-STARVED says it."""
    pace, learner = section(document, "merge_pace"), section(document, "learner")
    steps, due = number(pace, "steps"), number(pace, "sync_every")
    is_due = bool(learner) and text(document, "state") not in OVER and has_majority(document)
    if pace.get("is_late") is not True or steps is None or due is None or not is_due or is_starved(document):
        return ""
    path = critical_path([document])
    (region, phase), count = path.waits[0] if path is not None and path.waits else (("", ""), 0)
    if pace.get("is_starved") is True:
        cause = _starvation(document)
    elif path is not None and path.failed > count:
        cause = f"{path.failed} ballots failed beside the last {path.rounds} rounds"
    elif path is not None and WAITS_MANY * count > path.rounds:
        cause = f"{count} of {path.rounds} rounds waited for {region} in {phase}"
    else:
        cause = "no region or phase is waited for in particular"
    return f"each fragment is merged every {steps:.0f} steps, H is {due:.0f}; measured: {cause}"


def _standings(document: Document) -> Iterator[Finding]:
    """Compare what each region brings with the others.

    Every region knows it, so the leader and the region say it. All say it of a leader, who may be silent about itself.
    """
    if text(document, "state") in OVER:
        return
    standings = {text(row, "region"): row for row in rows(document, "standings")}
    for name, row in standings.items():
        if document.get("role") != "leader" and name not in (text(document, "region"), text(document, "leader")):
            continue
        peers = [standing for region, standing in standings.items() if region != name]
        if (number(row, "rounds") or 0.0) >= STANDING_ROUNDS and (line := _outweighs(document, row, peers)):
            yield _make(kinds.OUTWEIGHS, document, f"{name} {line}", region=name)
        if (ratio := number(row, "length_ratio") or 0.0) > LENGTH_RATIO_MAX:
            line = f"{name} brings {ratio:.3g} times the length of the median region, step for step"
            yield _make(kinds.TOO_LONG, document, line, region=name)
        count, negative = number(row, "cosines") or 0.0, number(row, "cosines_negative") or 0.0
        cosine, recent = number(row, "cosine") or 0.0, number(row, "cosine_recent") or 0.0
        is_usual = count >= STANDING_ROUNDS and cosine < 0.0 and negative >= NEGATIVE_PART * count
        if is_usual or recent < COSINE_MIN or row.get("is_opposed") is True:
            line = f"{name} points against the others: cosine {cosine:.2f}, negative in {negative:.0f} of {count:.0f}"
            line += "; nothing of it counts" if row.get("is_opposed") is True else ""
            yield _make(kinds.AGAINST, document, line, region=name)


def _outweighs(document: Document, row: Document, peers: Sequence[Document]) -> str:
    ratio_max = number(document, "tokens_ratio_max") or math.inf
    for key, form, words in (
        ("tokens_per_step", ".4g", "counts {} tokens a step, the others' median is {}"),
        ("weight_share", ".0%", "has {} of the weight, the others' median is {}"),
    ):
        value, values = number(row, key) or 0.0, [rival for peer in peers if (rival := number(peer, key))]
        if values and value > ratio_max * median(values):
            times = value / median(values)
            return words.format(f"{value:{form}}", f"{median(values):{form}}") + f" ({times:.3g} times)"
    share, steps_share = number(row, "weight_share") or 0.0, number(row, "steps_share") or 0.0
    if len(peers) > 1 and share > max(WEIGHT_RATIO_MAX, ratio_max / 2) * steps_share > 0.0:
        return f"has {share:.0%} of the weight, but makes {steps_share:.0%} of the steps"
    return ""


def _learner(document: Document) -> Iterator[Finding]:
    fault, trouble = learner_fault(document), _trouble(document)
    if fault is not None and trouble is not None and _is_same(fault[1], text(document["learner_warning"], "text")):
        # A script that fails ends its process: one cause, one alert. Of both the graver, or the one that stays.
        fault, trouble = (fault, None) if fault[0].mark is Mark.FAILED else (None, trouble)
    base = (kinds.BASE_DIFFERS, words) if (words := text(document, "base_difference")) else None
    for alert in (fault, trouble, base):
        if alert is not None:
            yield _make(alert[0], document, alert[1])


def _is_same(fault: str, words: str) -> bool:
    """Whether the process ended with the error that the learner told. Either text may be cut, or of several lines."""
    first_line = re.split(r"\\n|\n", words.removeprefix(FAILED_PREFIX))[0]
    return words.startswith(FAILED_PREFIX) and first_line[:SAME_CHARS] in fault


def _trouble(document: Document) -> tuple[AlertKind, str] | None:
    """Say of what the learner told within LOSS_SHOWN_S, with the kind of alert."""
    warning = section(document, "learner_warning")
    age_s, words = number(warning, "age_seconds"), text(warning, "text")
    if age_s is None or age_s >= LOSS_SHOWN_S:
        return None
    has_failed = warning.get("is_failure") is True
    if _LOSS.match(words):
        kind = kinds.LOSS_NAN if has_failed else kinds.LOSS_SPIKE
    elif words.startswith(TOKENS_TOLD):
        kind = kinds.OUTWEIGHS
    else:
        kind = kinds.LEARNER_FAILED if has_failed else kinds.LEARNER_WARNS
    return kind, f"{words} ({duration(age_s)} ago)"


def learner_fault(document: Document) -> tuple[AlertKind, str] | None:
    """Explain why this region's learner does not train, with the kind of alert; None if it trains or need not."""
    if text(document, "state") in OVER:
        return None
    learner = section(document, "learner")
    if text(section(document, "learner_process"), "state") in ("stopped", "done") or not learner:
        return _process_fault(document)
    if learner.get("finished") is True:
        return kinds.LEARNER_ENDED, f"the learner ended at step {_progress(document)}"
    if section(learner, "busy"):
        return None
    ages = (number(learner, key) for key in ("report_age_seconds", "step_seconds", "first_step_wait_seconds"))
    silence = learner_silence(*ages)
    return (kinds.LEARNER_SILENT, silence) if silence else None


def _process_fault(document: Document) -> tuple[AlertKind, str] | None:
    process = section(document, "learner_process")
    state, reason = text(process, "state"), text(process, "reason")
    if state == "stopped":
        return kinds.LEARNER_STOPPED, f"the learner is stopped: {reason}"
    if state == "done":
        return kinds.LEARNER_ENDED, f"the learner ended at step {_progress(document)}" + f": {reason}" * bool(reason)
    exit_code, restarts = number(process, "exit_code"), number(process, "restarts") or 0.0
    if exit_code or (exit_code == 0 and reason):
        reason = reason or f"exit code {exit_code:.0f}"
        again = "; it runs again, and has not attached yet" * (state == "running")
        return kinds.LEARNER_CRASHES, f"the learner's process ended: {reason}; {restarts:.0f} restarts{again}"
    is_perhaps_witness = not process and not number(document, "inner_steps")
    # Before the first parameters it attaches only when all regions are there: those are what is missing.
    is_first_start = state == "running" and not is_founded(document)
    if text(document, "state") == "starting" or is_perhaps_witness or is_first_start:
        return None
    why = ": its process runs, and is not attached" * (state == "running")
    return kinds.LEARNER_MISSING, f"no learner is attached{why}"


def _progress(document: Document) -> str:
    run = section(document, "run")
    total = number(run, "total_steps")
    own = f"{number(document, 'inner_steps') or 0:.0f}"
    return own + (f", the run is at {number(run, 'step') or 0:.0f} of {total:.0f}" if total else "")


def is_starved(document: Document) -> bool:
    """Whether the daemon waits so long for a processor that round trips and rounds say nothing about links."""
    late_s = number(section(document, "machine"), "late_seconds")
    return late_s is not None and late_s > STARVED_LATE_S


def _starvation(document: Document) -> str:
    machine = section(document, "machine")
    waits = number(machine, "cpu_pressure_percent")
    pressure = "" if waits is None else f"; processes waited for a processor {waits:.0f} % of the last 10 s"
    return f"the daemon's timers fire up to {duration(number(machine, 'late_seconds') or 0.0)} late{pressure}"


def _machine(document: Document) -> Iterator[Finding]:
    disk = section(document, "disk")
    free, size = number(disk, "free_bytes"), number(disk, "total_bytes")
    if text(disk, "refused"):
        yield _make(kinds.DISK_REFUSED, document, f"the disk refuses: {text(disk, 'refused')}")
    elif free is not None and size:
        need = STATES_FREE * STATE_BYTES * (number(document, "parameters") or 0.0)
        if free < max(need, DISK_LOW_PART * size):
            line = f"{human_bytes(free)} of {human_bytes(size)} are free where the state folder is"
            yield _make(kinds.DISK_LOW, document, line)
    if is_starved(document) and text(document, "state") not in OVER:
        pace = section(document, "merge_pace")
        steps, due = number(pace, "steps") or 0.0, number(pace, "sync_every") or 0.0
        late = f"; each fragment is merged every {steps:.0f} steps, H is {due:.0f}"
        yield _make(kinds.STARVED, document, _starvation(document) + late * (pace.get("is_starved") is True))
    certificate = section(document, "certificate")
    days, fault = number(certificate, "days_left"), text(certificate, "fault")
    if fault:
        yield _make(kinds.CERTIFICATE_ENDS, document, fault)
    elif days is not None and days < CERTIFICATE_DAYS:
        line = f"the certificate ends in {days:.0f} days" if days > 0 else "the certificate has ended"
        yield _make(kinds.CERTIFICATE_ENDS, document, line)
