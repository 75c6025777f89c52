"""What an operator's words make of the settings of a run, and which settings can't be changed so."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_node.config.field_types import changes
from diloco_node.config.ledger_settings import changed_settings
from diloco_node.config.reference import settings as all_settings
from diloco_node.config.resolve import load_config
from diloco_node.config.setting_texts import change_lines, difference_lines, setting_texts
from diloco_node.core.settings_body import LEDGER_KEYS, SettingsBody
from diloco_node.core.types import RunSettings
from diloco_node.errors import ConfigError

SETTINGS = RunSettings(sync_every=24, overlap_steps=2)
BODY = SettingsBody.of(SETTINGS)


def test_the_ledger_holds_the_settings_that_are_set_in_a_run() -> None:
    assert {key for key, field in all_settings() if changes(field) == "set"} == LEDGER_KEYS == set(setting_texts(BODY))


def test_several_words_make_one_change() -> None:
    words = ["rounds.sync_every=32", "rounds.grace_gamma = 0.5", 'rounds.ballot_deadline_min="5s"', "rounds.outer_lr=1"]
    body = changed_settings(SETTINGS, words)
    assert body == replace(BODY, sync_every=32, grace_gamma=0.5, ballot_deadline_min_ns=5_000_000_000, outer_lr=1.0)
    assert change_lines(BODY, body) == [
        "rounds.sync_every 24 -> 32",
        "rounds.grace_gamma 0.8 -> 0.5",
        "rounds.outer_lr 0.5 -> 1.0",
        'rounds.ballot_deadline_min "2s" -> "5s"',
    ]


def test_no_outer_rate_is_that_of_the_runs_length() -> None:
    short = replace(SETTINGS, steps_max=480, outer_lr=0.1, outer_momentum=0.1)
    assert changed_settings(short, ["rounds.outer_lr=none"]) == replace(SettingsBody.of(short), outer_lr=0.7)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (
            "rounds.codec_up=int8",
            "rounds.codec_up can't be set in a run: a run keeps it, for its files are made with it",
        ),
        ("run.id=other", "begin a new run; run.init takes this one's model"),
        (
            "run.steps=100",
            "each learner's schedule was made for it at its start. it changes while all regions are stopped",
        ),
        ("rounds.carry=overwrite", "learners hold steps by it"),
        ("rounds.heartbeat=100ms", "the ledger that would carry the change keeps time by it"),
        ("run.seed=3", "processes read it when they start"),
        ("model.lr=0.1", "it is each region's own: change it in the region's run.toml, and start that again"),
        ("regions.eu.admin_port=1", "it is each region's own"),
        ("regions.eu.egress=1Gbit/s", "diloco-node budget set changes it"),
        ("budget.per_peer.eu.egress=1Gbit/s", "diloco-node budget set changes it"),
        ("run.init=model", "it has no effect once a run has begun"),
        ("rounds.sync_evry=3", "there is no setting 'rounds.sync_evry', did you mean rounds.sync_every?"),
        ("sync_every=3", "there is no setting 'sync_every'"),
        ("rounds.sync_every", "'rounds.sync_every': write KEY=VALUE, for example rounds.sync_every=32"),
        ("rounds.sync_every=0", 'rounds.sync_every is "0" (config set): it must be greater than or equal to 1'),
        ("rounds.sync_every=many", 'rounds.sync_every is "many" (config set): it must be'),
        ("rounds.grace_gamma=nan", "rounds.grace_gamma is"),
        ("rounds.ballot_deadline_min=5", "it has no unit"),
        ("rounds.quorum_min=none", "rounds.quorum_min is"),
    ],
)
def test_what_can_not_be_set_in_a_run_is_refused_with_the_reason_and_the_way(word: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        changed_settings(SETTINGS, [word])


def test_a_setting_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"rounds\.sync_every is set twice, to 3 and to 4"):
        changed_settings(SETTINGS, ["rounds.sync_every=3", "rounds.sync_every=4"])


def test_a_file_that_differs_is_told_both_values_and_what_to_write() -> None:
    file = setting_texts(BODY) | {"run.steps": "100"}
    assert difference_lines(file, BODY, unset=()) == []
    for unset, place in (((), "in run.toml"), (("rounds.sync_every",), "by default")):
        assert difference_lines(file, replace(BODY, sync_every=32), unset=unset) == [
            f"rounds.sync_every is 24 {place} here, 32 in the run, which counts: write sync_every = 32 under [rounds]"
        ]


def test_the_two_digests_have_each_shared_setting_once(tmp_path: Path) -> None:
    def digests(rounds: str = "", run: str = "") -> tuple[str, str]:
        path = tmp_path / "run.toml"
        regions = '[regions.eu]\n[regions.us]\naddress = "h:1"'
        path.write_text(f'[run]\nid = "try"\n{run}\n[rounds]\n{rounds}\n{regions}')
        config = load_config(path)
        return config.settings_digest(), config.founding_digest()

    always, founding = digests()
    for change in (digests("fragments = 8"), digests('carry = "overwrite"'), digests(run="tokens = 5")):
        assert change[0] != always
        assert change[1] == founding
    for line in ("sync_every = 25", "outer_lr = 0.25", 'ballot_deadline_min = "9s"'):
        assert digests(line)[0] == always
        assert digests(line)[1] != founding
