"""The settings of the run as one region shows them: by the ledger, beside those of its run.toml."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from diloco_node.config.setting_texts import change_lines, difference_lines, setting_texts
from diloco_node.core.events import Note
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.settings_body import LEDGER_KEYS, SettingsBody
from diloco_node.core.types import RunSettings
from diloco_node.daemon.console import console_line
from diloco_node.daemon.spec import NodeSpec
from diloco_node.errors import ConfigError

ASSIGNMENTS_MAX: Final = 64
ORIGIN: Final = "the run's ledger"


def settings_order(document: Mapping[str, Any], settings: RunSettings) -> tuple[EntryOrdered, list[str]]:
    """The order in a request, {"set": ["rounds.sync_every=32", ...]}, and its changes. Raises ConfigError."""
    from diloco_node.config.ledger_settings import changed_settings  # brings pydantic

    words = document.get("set")
    texts = [word for word in words if isinstance(word, str)] if isinstance(words, list) else []
    if not 0 < len(texts) <= ASSIGNMENTS_MAX or texts != words:
        raise ConfigError(f"the body must name 1 to {ASSIGNMENTS_MAX} settings, as rounds.sync_every=32")
    body = changed_settings(settings, texts)
    return EntryOrdered(body), change_lines(SettingsBody.of(settings), body)


class SettingsWatch:
    """Tells each change of the run's settings here, and where run.toml differs from them.

    shown, joiner_settings: as in `NodeSpec`, with the settings in force.
    """

    def __init__(self, spec: NodeSpec, note: Callable[[Note], None]) -> None:
        self.shown, self.joiner_settings = spec.settings_shown, spec.joiner_settings
        self._region, self._note = spec.region, note
        self._file = dict(line.split("=", 1) for line in spec.shared_settings)
        self._unset = [key for key, _, origin in self.shown if origin == "default"]
        self._settings = spec.settings

    @property
    def agreed(self) -> tuple[str, ...]:
        """The shared settings of run.toml that no ledger holds, "name=value" each."""
        return tuple(f"{key}={text}" for key, text in self._file.items() if key not in LEDGER_KEYS)

    def look(self, settings: RunSettings) -> bool:
        """Tell what changed since the last look, at first since run.toml; whether anything did."""
        if settings is self._settings:
            return False
        before, self._settings = SettingsBody.of(self._settings), settings
        if (body := SettingsBody.of(settings)) == before:
            return False
        changes, differences = change_lines(before, body), difference_lines(self._file, body, unset=self._unset)
        text = f"settings of the run by its ledger: {', '.join(changes)}"
        console_line(self._region, text)
        self._note(Note("settings", "; ".join((text, *differences))))
        for line in differences:
            console_line(self._region, line)
        texts = setting_texts(body)
        changes_of_file = {key: text for key, text in texts.items() if self._file.get(key, text) != text}
        self.shown = tuple(
            (row[0], changes_of_file[row[0]], ORIGIN) if row[0] in changes_of_file else row for row in self.shown
        )
        joiner = dict(line.split("=", 1) for line in self.joiner_settings)
        self.joiner_settings = tuple(f"{key}={text}" for key, text in (joiner | changes_of_file).items())
        return True
