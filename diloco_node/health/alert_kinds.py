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
    """A kind of alert.

    Attributes:
        meaning: one sentence, the same for every case. hint: the remedy. command: to copy; empty if there is none.
    """

    code: str
    mark: Mark
    meaning: str
    hint: str
    command: str = ""


NO_MAJORITY: Final = AlertKind(
    "A-NO-MAJORITY",
    Mark.FAILED,
    "Fewer than a majority of the regions hear each other, so nothing is merged.",
    "Bring one of the missing regions back; if they have finished, with `start --serve`. "
    "Learners train on meanwhile, and nothing is lost.",
)
CUT_OFF: Final = AlertKind(
    "A-CUT-OFF",
    Mark.WARNING,
    "A region hears fewer than a majority, and the others merge on without it.",
    "Look at the network of that region. It trains on, and its work is merged when it is back.",
    "diloco-node doctor --region {region}",
)
LAST_MAJORITY: Final = AlertKind(
    "A-LAST-MAJORITY",
    Mark.WARNING,
    "A region is missing, and one more failure stops merging.",
    "Bring the missing region back before anything is restarted or updated.",
)
PEER_DOWN: Final = AlertKind(
    "A-PEER-DOWN",
    Mark.WARNING,
    "This region has no link to a peer, or hears nothing from it.",
    "If the region does not run, start it on its machine. If it runs, look at the address, the firewall and its log.",
    "diloco-node start --region {region}",
)
NO_COMMIT: Final = AlertKind(
    "A-NO-COMMIT",
    Mark.FAILED,
    "No round was committed for ten times the usual time.",
    "Ask why: it names the region and the phase that rounds wait for.",
    "diloco-node why {region}",
)
LEFT_OUT: Final = AlertKind(
    "A-LEFT-OUT",
    Mark.WARNING,
    "The leader leaves a region out of its ballots for a while.",
    "Measure the links of that region and check its MTU and its disk. It is tried again by itself.",
    "diloco-node measure mesh",
)
QUARANTINE: Final = AlertKind(
    "A-QUARANTINE",
    Mark.WARNING,
    "A peer broke the protocol again and again and is shut out for a while.",
    "Look at that machine: other code, or damaged memory. Then readmit it.",
    "diloco-node quarantine lift {region} {own}",
)
LEARNER_STOPPED: Final = AlertKind(
    "A-LEARNER-STOPPED",
    Mark.FAILED,
    "The learner crashed so often that it is not started again.",
    "Read {log}, mend the script, then start the learner.",
    "diloco-node learner start {region}",
)
LEARNER_ENDED: Final = AlertKind(
    "A-LEARNER-ENDED",
    Mark.FAILED,
    "The training script ended although the run goes on.",
    "Have the loop repeat its data until `should_stop` is true, then start the learner again.",
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
    "A learner is attached, but has reported no step for much longer than its steps take.",
    "Look at its process and its device. A hang is found by itself after [learner] hang; then it is started again.",
    "tail -n 40 {log}",
)
LEARNER_MISSING: Final = AlertKind(
    "A-LEARNER-MISSING",
    Mark.WARNING,
    "No learner is attached, so this region trains nothing.",
    "Right after a start it still imports and builds the model. Later, read {log}.",
    "tail -n 40 {log}",
)
LOSS_NAN: Final = AlertKind(
    "A-LOSS-NAN",
    Mark.WARNING,
    "The learner failed within the last ten minutes, as it does after three losses that are NaN or infinite.",
    "It starts again from the merged parameters. If it comes again, look at the data and the learning rate here.",
    "tail -n 40 {log}",
)
LOSS_SPIKE: Final = AlertKind(
    "A-LOSS-SPIKE",
    Mark.INFO,
    "Loss or gradient norm was far out of its range within the last ten minutes.",
    "Compare the loss of all regions. One that goes back by itself needs nothing.",
    "tail -n 40 {log}",
)
BUDGET_SMALL: Final = AlertKind(
    "A-BUDGET-SMALL",
    Mark.WARNING,
    "The schedule can't be kept within the bandwidth budget, so merges come late.",
    "Set one of the values that the line names.",
    "diloco-node plan --config run.toml",
)
DISK_REFUSED: Final = AlertKind(
    "A-DISK-REFUSED",
    Mark.FAILED,
    "The disk of the state folder refuses what is written; it is tried again.",
    "Make room, or remount it writable. Nothing needs to be started again.",
    "df -h {state}",
)
DISK_LOW: Final = AlertKind(
    "A-DISK-LOW",
    Mark.WARNING,
    "The disk of the state folder is nearly full.",
    "Make room. Each checkpoint needs eight bytes for each parameter.",
    "df -h {state}",
)
CERTIFICATE_ENDS: Final = AlertKind(
    "A-CERT-ENDS",
    Mark.WARNING,
    "This region's certificate ends within 30 days; without it no link comes up.",
    "Make new ones for all regions, copy them there, and start all regions again.",
    "diloco-node certs --help",
)
DIGEST_DIFFERS: Final = AlertKind(
    "A-DIGEST-DIFFERS",
    Mark.FAILED,
    "Regions hold different bytes at the same version: memory or a disk is damaged.",
    "The log names fragment and regions. Stop the region that differs and check its hardware.",
    "diloco-node replay {state}",
)
SETTINGS_DIFFER: Final = AlertKind(
    "A-SETTINGS-DIFFER",
    Mark.WARNING,
    "A peer has other settings, another run or another model, so there is no link to it.",
    "Copy the same run.toml to all regions and start those that changed.",
    "diloco-node config show",
)
VERSION_DIFFERS: Final = AlertKind(
    "A-VERSION-DIFFERS",
    Mark.WARNING,
    "A peer runs a version of diloco-node that speaks another protocol.",
    "Install the same version everywhere.",
    "diloco-node --version",
)
ALERT_KINDS: Final = (
    NO_MAJORITY,
    CUT_OFF,
    LAST_MAJORITY,
    PEER_DOWN,
    NO_COMMIT,
    LEFT_OUT,
    QUARANTINE,
    LEARNER_STOPPED,
    LEARNER_ENDED,
    LEARNER_CRASHES,
    LEARNER_SILENT,
    LEARNER_MISSING,
    LOSS_NAN,
    LOSS_SPIKE,
    BUDGET_SMALL,
    DISK_REFUSED,
    DISK_LOW,
    CERTIFICATE_ENDS,
    DIGEST_DIFFERS,
    SETTINGS_DIFFER,
    VERSION_DIFFERS,
)
