"""Settings that the ledger holds: what an operator's words make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel, ValidationError

from diloco_node.config import reference
from diloco_node.config.field_types import Changes, changes
from diloco_node.config.resolve import default_outer, did_you_mean, explain
from diloco_node.config.schema import RoundsSection
from diloco_node.config.setting_texts import section_values
from diloco_node.config.sources import Key, Sources
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import RunSettings
from diloco_node.errors import ConfigError

COMMAND: Final = "config set"
OUTER: Final = ("outer_lr", "outer_momentum")

_WAYS: Final[dict[Changes, str]] = {
    "fixed": "a run keeps it, for its files are made with it: begin a new run; run.init takes this one's model",
    "same": "processes read it when they start, and the data follow from it: begin a new run",
    "all": "it changes while all regions are stopped: stop them, change it in each run.toml, and start them",
    "region": "it is each region's own: change it in the region's run.toml, and start that again",
    "running": "it is each region's own: diloco-node budget set changes it",
    "new run": "it has no effect once a run has begun",
}

_REASONS: Final = {
    "run.steps": "each learner's schedule was made for it at its start. ",
    "run.tokens": "each learner's schedule was made for it at its start. ",
    "rounds.carry": "learners hold steps by it that were not merged yet. ",
    "rounds.heartbeat": "the ledger that would carry the change keeps time by it. ",
    "rounds.election_timeout": "the ledger that would carry the change keeps time by it. ",
}


class _RunFile(BaseModel):
    rounds: RoundsSection


def changed_settings(settings: RunSettings, assignments: Sequence[str]) -> SettingsBody:
    """The settings of a run after an operator's words, "rounds.sync_every=32" each.

    Raises ConfigError: one can't be set in a run, with the reason and the way; or it has a value that can't be.
    """
    values = section_values(SettingsBody.of(settings))
    texts: dict[str, str] = {}
    for assignment in assignments:
        key, equals, text = (word.strip() for word in assignment.partition("="))
        if not equals:
            raise ConfigError(f"{assignment!r}: write KEY=VALUE, for example rounds.sync_every=32")
        _check_key(key)
        if key in texts:
            raise ConfigError(f"{key} is set twice, to {texts[key]} and to {text}")
        texts[key] = text
        name = key.partition(".")[2]
        values[name] = None if text == "none" and name in OUTER else text.strip("\"'")
    origins: dict[Key, str] = {("rounds", key.partition(".")[2]): COMMAND for key in texts}
    try:
        section = _RunFile.model_validate({"rounds": values}).rounds
    except ValidationError as error:
        raise ConfigError(explain(error, Sources(origins=origins))) from None
    defaults = dict(zip(OUTER, default_outer(settings.steps_max // section.sync_every), strict=True))
    result = {name: getattr(section, name) for name in values}
    result |= {name: default for name, default in defaults.items() if result[name] is None}
    return SettingsBody(ballot_deadline_min_ns=result.pop("ballot_deadline_min").ns, **result)


def _check_key(key: str) -> None:
    if (field := reference.setting_of(key)) is None:
        raise ConfigError(f"there is no setting {key!r}{did_you_mean(key, dict(reference.settings()))}")
    if (kind := changes(field)) != "set":
        raise ConfigError(f"{key} can't be set in a run: {_REASONS.get(key, '')}{_WAYS[kind]}")
