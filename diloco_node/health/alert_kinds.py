"""The kinds of alerts: code, mark, meaning, hint and command. docs/alerts.md has the same table.

Names in braces are filled in: `{region}` is the region that the alert is about, `{own}` the one that raises it, `{log}`
the log of the learner, `{state}` the state folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diloco_node.health.finding import Mark


@dataclass(frozen=True, slots=True)
class AlertKind:
    """A kind of alert. meaning: one sentence, the same for every case. hint: the remedy. command: to copy, if any."""

    code: str
    mark: Mark
    meaning: str
    hint: str
    command: str = ""


NO_MAJORITY: Final = AlertKind(
    "A-NO-MAJORITY",
    Mark.FAILED,
    "Fewer than a majority of the regions hear each other, so nothing is merged.",
    "Bring a missing region back; if it has finished, with `start --serve`. If a majority is lost for good: "
    "`members recover`. Learners train on meanwhile.",
)
CUT_OFF: Final = AlertKind(
    "A-CUT-OFF",
    Mark.WARNING,
    "A region hears fewer than a majority, and the others merge on without it.",
    "Look at that region's network. Its work is merged when it is back.",
    "diloco-node doctor --region {region}",
)
LAST_MAJORITY: Final = AlertKind(
    "A-LAST-MAJORITY",
    Mark.WARNING,
    "A region is missing, and one more failure stops merging.",
    "Bring it back before anything is restarted.",
)
PEER_DOWN: Final = AlertKind(
    "A-PEER-DOWN",
    Mark.WARNING,
    "This region does not hear a peer.",
    "Start it on its machine; a new one with `--join`. If it runs, look at address, firewall and log.",
    "diloco-node start --region {region}",
)
NO_COMMIT: Final = AlertKind(
    "A-NO-COMMIT",
    Mark.FAILED,
    "No round was committed for ten times the usual time.",
    "Ask which region and phase rounds wait for.",
    "diloco-node why {region}",
)
MERGES_LATE: Final = AlertKind(
    "A-MERGES-LATE",
    Mark.INFO,
    "Fragments are merged less often than every H steps, for the cause that the line names.",
    "Mend that cause, or raise `sync_every`: late merges cost little, and nothing is lost.",
    "diloco-node why {region}",
)
LEFT_OUT: Final = AlertKind(
    "A-LEFT-OUT",
    Mark.WARNING,
    "The leader leaves a region out for a while.",
    "Measure its links, and check its MTU and disk. It is tried again by itself.",
    "diloco-node measure mesh",
)
OUTWEIGHS: Final = AlertKind(
    "A-OUTWEIGHS",
    Mark.WARNING,
    "A region counts or weighs much more than the others; what is beyond them counts as theirs.",
    "Give `step()` the tokens of one rank, and no bytes. If they are right, raise `tokens_ratio_max` everywhere.",
    "diloco-node config show",
)
TOO_LONG: Final = AlertKind(
    "A-TOO-LONG",
    Mark.WARNING,
    "What a region learnt was much longer than what the others did, and was shortened or left out.",
    "Compare its learning rate, and whether it loaded other weights.",
    "diloco-node why {region}",
)
AGAINST: Final = AlertKind(
    "A-AGAINST",
    Mark.WARNING,
    "What a region learns points against what the others learn, round after round.",
    "Compare its data, its loss and the sign of its gradient. If they are wrong, stop its learner.",
    "diloco-node why {region}",
)
QUARANTINE: Final = AlertKind(
    "A-QUARANTINE",
    Mark.WARNING,
    "A peer broke the protocol often and is shut out for a while.",
    "Look at that machine's version and memory, then readmit it.",
    "diloco-node quarantine lift {region} {own}",
)
LEARNER_STOPPED: Final = AlertKind(
    "A-LEARNER-STOPPED",
    Mark.FAILED,
    "The learner crashed often and is not started again.",
    "Read {log}, mend the script, then start the learner.",
    "diloco-node learner start {region}",
)
LEARNER_ENDED: Final = AlertKind(
    "A-LEARNER-ENDED",
    Mark.FAILED,
    "The training script ended although the run goes on.",
    "Have the script call attach(), and repeat its data until `should_stop` is true. Then start it again.",
    "diloco-node learner start {region}",
)
LEARNER_CRASHES: Final = AlertKind(
    "A-LEARNER-CRASHES",
    Mark.WARNING,
    "The learner's process ended with an error and is started again.",
    "Read the last lines of {log}.",
    "tail -n 40 {log}",
)
LEARNER_SILENT: Final = AlertKind(
    "A-LEARNER-SILENT",
    Mark.WARNING,
    "The learner has reported no step for much longer than its steps take.",
    "Look at its process and device. After [learner] hang it is started again.",
    "tail -n 40 {log}",
)
LEARNER_MISSING: Final = AlertKind(
    "A-LEARNER-MISSING",
    Mark.WARNING,
    "No learner is attached, so this region trains nothing.",
    "Wait right after a start. Later, read {log}.",
    "tail -n 40 {log}",
)
LOSS_NAN: Final = AlertKind(
    "A-LOSS-NAN",
    Mark.WARNING,
    "The learner ended itself within the last ten minutes: loss or gradient norm was NaN, infinite or far too large.",
    "It starts again from the merged parameters. Look at the data and the learning rate.",
    "tail -n 40 {log}",
)
LEARNER_FAILED: Final = AlertKind(
    "A-LEARNER-FAILED",
    Mark.WARNING,
    "The learner failed within the last ten minutes, with the error that is told here.",
    "Mend what the error names. The learner starts again from the merged parameters.",
    "tail -n 40 {log}",
)
LEARNER_WARNS: Final = AlertKind(
    "A-LEARNER-WARNS",
    Mark.INFO,
    "Within the last ten minutes the learner warned of something in its script or model.",
    "Read the text: what it names may train or merge otherwise than you think.",
    "tail -n 40 {log}",
)
BASE_DIFFERS: Final = AlertKind(
    "A-BASE-DIFFERS",
    Mark.WARNING,
    "This region's frozen parameters or buffers are others than those with which the run began, or were not compared.",
    "Have its script load and build the same model as the region that is named, and start it again.",
    "tail -n 40 {log}",
)
LOSS_SPIKE: Final = AlertKind(
    "A-LOSS-SPIKE",
    Mark.INFO,
    "Loss or gradient norm was far out of range within the last ten minutes.",
    "Compare the loss of all regions.",
    "tail -n 40 {log}",
)
BUDGET_SMALL: Final = AlertKind(
    "A-BUDGET-SMALL",
    Mark.WARNING,
    "The budget is too small for the schedule, so merges come late.",
    "Set one of the values that the line names.",
    "diloco-node plan --config run.toml",
)
DISK_REFUSED: Final = AlertKind(
    "A-DISK-REFUSED",
    Mark.FAILED,
    "The disk of the state folder refuses what is written; it is tried again.",
    "Do as the line says: make room, remount it writable, or give the folder to the daemon's user.",
    "df -h {state}",
)
DISK_LOW: Final = AlertKind(
    "A-DISK-LOW",
    Mark.WARNING,
    "The disk of the state folder is nearly full.",
    "Make room: a checkpoint needs eight bytes for each parameter.",
    "df -h {state}",
)
STARVED: Final = AlertKind(
    "A-STARVED",
    Mark.WARNING,
    "This machine is starved: the daemon waits for a processor, so heartbeats and rounds come late.",
    "Run less beside it, give the learner fewer threads, or take more cores.",
    "cat /proc/pressure/cpu",
)
CERTIFICATE_ENDS: Final = AlertKind(
    "A-CERT-ENDS",
    Mark.WARNING,
    "This region's certificate ends within 30 days, has ended, or is revoked.",
    "Where ca.key is, renew it; copy the region's folder here, and send SIGHUP to diloco-node start.",
    "diloco-node certs renew {own}",
)
DIGEST_DIFFERS: Final = AlertKind(
    "A-DIGEST-DIFFERS",
    Mark.FAILED,
    "Regions differ at the same version: memory or a disk is damaged.",
    "Stop the region that the log names, and check its hardware.",
    "diloco-node replay {state}",
)
LEDGER_FORKS: Final = AlertKind(
    "A-LEDGER-FORKS",
    Mark.FAILED,
    "Two ledgers differ as none can: a state folder or a witness's record is an older copy, or a region lies.",
    "Stop the region with the copy, empty its folder, and start it. Nothing here was dropped.",
    "diloco-node ledger {state}",
)
LEADER_WRONG: Final = AlertKind(
    "A-LEADER-WRONG",
    Mark.WARNING,
    "A region led with entries that its ledger does not allow. None was taken, and others lead since.",
    "Compare its version and its machine's memory with the others'. If nothing explains it, expel it.",
    "diloco-node quarantine add {region} {own}",
)
OVERBOOKED: Final = AlertKind(
    "A-OVERBOOKED",
    Mark.WARNING,
    "The ledger has steps as lost that this region's learner never made: a leader lied while few were there to object.",
    "Start the learner again: its next life is merged. Then look for who led, and expel it.",
    "diloco-node ledger {state}",
)
SETTINGS_DIFFER: Final = AlertKind(
    "A-SETTINGS-DIFFER",
    Mark.WARNING,
    "A peer has other settings, another run or another model.",
    "Copy the same run.toml to all regions, and start them again.",
    "diloco-node config show",
)
VERSION_DIFFERS: Final = AlertKind(
    "A-VERSION-DIFFERS",
    Mark.WARNING,
    "A peer's version speaks another protocol.",
    "Install the same version everywhere.",
    "diloco-node --version",
)
ALERT_KINDS: Final = tuple(kind for kind in tuple(globals().values()) if isinstance(kind, AlertKind))
