"""docs/settings.md is made of the schema, and is what it says now."""

from pathlib import Path

from diloco_node.config.field_types import changes, touch_when
from diloco_node.config.reference import SECTIONS, explanation, settings
from diloco_node.config.resolve import load_config
from diloco_node.config.schema import FIXED_IN_A_RUN, RoundsSection, Tree
from diloco_node.wire.field_bounds import SETTING_BYTES
from tests.kit.repository import ROOT
from tests.kit.settings_page import ABOUT, COMMAND, settings_page


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page(), f"write it again: {COMMAND}"


def test_every_setting_has_words_and_a_place_on_the_page() -> None:
    for key, field in settings():
        assert field.description, key
        assert touch_when(field), key
    assert {name for name in SECTIONS if "." not in name} == set(Tree.model_fields) - {"regions"}
    assert "regions.NAME" in SECTIONS
    assert SECTIONS.keys() == ABOUT.keys()


def test_one_setting_is_explained_by_its_own_name() -> None:
    words = "H: inner steps between two merges of one fragment. Allowed: 1 to 100,000. Default: 24. Touch it when: "
    assert explanation("rounds.sync_every").startswith(words)
    assert "table" in explanation("budget.schedule")
    assert "Touch it when: behind NAT." in explanation("regions.eu.listen")
    assert explanation("budget.per_peer.eu.egress").startswith("ceiling of the traffic to that region. Allowed: a rate")


def test_types_defaults_and_bounds_are_those_of_the_schema() -> None:
    page = settings_page()
    for row in (
        "| `sync_every` | `24` | 1 to 100,000 | set | ",
        "| `outer_lr` | none | above 0 to 10 | set | ",
        '| `codec_up` | `"int4"` | `int4`, `int8`, `bf16`, `fp32` | fixed | ',
        '| `heartbeat` | `"200ms"` | a time | all | ',
        "| `id` | must be set | 1 to 63 of a-z, 0-9, `-` | fixed | ",
        "| `seed` | `0` | 0 and below 2^31 | same | ",
        "| `hf_args` | `{}` | a table | region | ",
        '| `text_field` | `"text"` | text | region | ',
        "| `steps` | `0` | 0 to 2^40 | all | ",
        "| `egress` | none | a rate, at least 100kbit/s | running | ",
        "| `start` | must be set | a time of day | running | ",
        "| `preload` | none | a list, at most 100 | region | ",
        '| `on_spike` | `"warn"` | `warn`, `rollback` | region | ',
        "| `streaming` | `false` | `true`, `false` | region | ",
    ):
        assert row in page, row


def test_what_regions_compare_is_what_the_page_says_that_they_compare(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nid = "one"\n[regions.a]\naddress = "a:1"\n')
    shared_settings = load_config(path).shared_settings()
    page_keys = {key for key, field in settings() if key in FIXED_IN_A_RUN or changes(field) in ("all", "set")}
    assert set(shared_settings) == page_keys
    assert max(len(f"{key}={value}") for key, value in shared_settings.items()) <= SETTING_BYTES // 2


def test_what_is_fixed_in_a_run_is_a_setting_that_all_regions_share() -> None:
    assert {f"rounds.{name}" for name in RoundsSection.model_fields} >= FIXED_IN_A_RUN
