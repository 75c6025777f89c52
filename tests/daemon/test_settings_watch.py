"""Settings of the run as a region tells them: each change, and what its run.toml has otherwise."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from diloco_node.config.setting_texts import setting_texts
from diloco_node.core.events import Note
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import RunSettings
from diloco_node.daemon.settings_watch import ORIGIN, SettingsWatch, settings_order
from diloco_node.daemon.spec import NodeSpec
from diloco_node.errors import ConfigError

SETTINGS = RunSettings()
FILE = tuple(f"{key}={text}" for key, text in setting_texts(SettingsBody.of(SETTINGS)).items())
SPEC = cast(
    NodeSpec,
    SimpleNamespace(
        region="eu",
        settings=SETTINGS,
        shared_settings=("rounds.fragments=24", *FILE),
        joiner_settings=("run.steps=9", "rounds.sync_every=24"),
        settings_shown=(("run.id", '"try"', "run.toml:2"), ("rounds.sync_every", "24", "run.toml:5")),
    ),
)


def test_a_change_is_told_once_with_both_values_and_what_run_toml_has(capsys: pytest.CaptureFixture[str]) -> None:
    notes: list[Note] = []
    watch = SettingsWatch(SPEC, notes.append)
    assert watch.agreed == ("rounds.fragments=24",)
    assert not watch.look(SETTINGS)
    assert not watch.look(replace(SETTINGS, steps_max=9)), "none of those that the ledger holds"
    other = replace(SETTINGS, sync_every=32, grace_gamma=0.5)
    assert watch.look(other)
    assert not watch.look(other)
    text = "settings of the run by its ledger: rounds.sync_every 24 -> 32, rounds.grace_gamma 0.8 -> 0.5"
    assert [note.kind for note in notes] == ["settings"]
    assert notes[0].text.startswith(f"{text}; rounds.sync_every is 24 in run.toml here, 32 in the run")
    assert text in capsys.readouterr().out
    assert watch.shown == (SPEC.settings_shown[0], ("rounds.sync_every", "32", ORIGIN))
    assert watch.joiner_settings == ("run.steps=9", "rounds.sync_every=32", "rounds.grace_gamma=0.5")
    assert watch.look(SETTINGS), "back to what run.toml has"
    assert "in run.toml here" not in notes[1].text


@pytest.mark.parametrize("body", [{}, {"set": []}, {"set": "rounds.sync_every=3"}, {"set": [3]}, {"set": ["a=b"] * 65}])
def test_a_request_that_names_no_settings_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="the body must name 1 to 64 settings"):
        settings_order(body, SETTINGS)


def test_a_change_is_told_without_what_reads_run_toml() -> None:
    """It takes a second to come, in which no heartbeat would leave."""
    program = """
import sys
from types import SimpleNamespace
from dataclasses import replace
from diloco_node.core.types import RunSettings
from diloco_node.daemon.settings_watch import SettingsWatch
spec = SimpleNamespace(region="eu", settings=RunSettings(), shared_settings=("rounds.sync_every=24",),
                       joiner_settings=(), settings_shown=())
assert SettingsWatch(spec, lambda note: None).look(replace(RunSettings(), sync_every=32))
print("pydantic" in sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "False"


def test_a_default_that_the_run_has_otherwise_is_called_one_at_each_change() -> None:
    notes: list[Note] = []
    spec = cast(
        NodeSpec, SimpleNamespace(**{**vars(SPEC), "settings_shown": (("rounds.sync_every", "24", "default"),)})
    )
    watch = SettingsWatch(spec, notes.append)
    for factor in (0.5, 0.6):
        assert watch.look(replace(SETTINGS, sync_every=32, grace_gamma=factor))
        assert "rounds.sync_every is 24 by default here" in notes[-1].text
