import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.config.resolve import NodeConfig, default_outer, load_config
from diloco_node.config.schema import ModelSection, RoundsSection
from diloco_node.config.sources import Flag
from diloco_node.config.units import parse_duration
from diloco_node.core.types import CarryMode, Codec, MergeRule, RunSettings
from diloco_node.errors import ConfigError

TEXT = """
[run]
id = "try"
steps = 400          # comment = 3

[rounds]
sync_every = 16
heartbeat = "100ms"
merge = "avg"

[data]
paths = ["text", "/abs/text"]

[regions.us-east]
address = "127.0.0.1:7400"

[regions."eu"]
address = "10.0.0.1:7400"
admin_port = 7500
"""


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("DILOCO_"):
            monkeypatch.delenv(name)


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    return path


def load(path: Path, *assignments: str) -> NodeConfig:
    return load_config(path, [Flag(*assignment.split("=", 1), f"--set {assignment}") for assignment in assignments])


# ---- what comes out --------------------------------------------------------------------------------------------------


def test_values_and_origins(run_toml: Path) -> None:
    config = load(run_toml)
    assert list(config.regions) == ["eu", "us-east"]
    assert config.rounds.sync_every == 16
    assert config.origin("rounds.sync_every") == f"{run_toml}:7"
    assert config.origin("regions.eu.admin_port") == f"{run_toml}:19"
    assert config.origin("rounds.fragments") == "default"
    rows = {key: (value, origin) for key, value, origin in config.rows()}
    assert rows["run.id"] == ('"try"', f"{run_toml}:3")
    assert rows["rounds.heartbeat"] == ('"100ms"', f"{run_toml}:8")
    assert rows["run.init"] == ("none", "default")


def test_flags_beat_environment_beats_file_beats_defaults(run_toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_ROUNDS__SYNC_EVERY", "32")
    monkeypatch.setenv("DILOCO_ROUNDS__MERGE", "rda")
    config = load_config(run_toml, [Flag("rounds.sync_every", "48", "--set"), Flag("rounds.sync_every", 64, "--flag")])
    assert (config.rounds.sync_every, config.origin("rounds.sync_every")) == (64, "--flag")
    assert (config.rounds.merge, config.origin("rounds.merge")) == (MergeRule.RDA, "DILOCO_ROUNDS__MERGE")
    assert (config.run.steps, config.origin("run.steps")) == (400, f"{run_toml}:4")
    assert (config.rounds.fragments, config.origin("rounds.fragments")) == (24, "default")


def test_relative_paths_are_taken_from_where_they_are_written(run_toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(run_toml)
    assert config.data.paths == (str(run_toml.parent / "text"), "/abs/text")
    assert config.state_dir("eu") == run_toml.parent / "state" / "eu"
    assert config.identity_dir("eu") == run_toml.parent / "certs" / "eu"
    monkeypatch.setenv("DILOCO_DATA__PATHS", "x:/y")
    config = load(run_toml, "run.state_dir=there")
    assert config.data.paths == ("x", "/y")
    monkeypatch.setenv("DILOCO_DATA__PATHS", "hf:owner/name#part:x:hf:other")
    assert load(run_toml).data.paths == ("hf:owner/name#part", "x", "hf:other")
    assert config.state_dir("eu") == Path("there/eu")


def test_durations_are_read_from_variables_too(run_toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_LEARNER__HANG", "90s")
    monkeypatch.setenv("DILOCO_ROUNDS__HEARTBEAT", "50ms")
    config = load(run_toml)
    assert config.learner.hang == parse_duration("90s")
    assert config.run_settings().heartbeat_ns == 50_000_000


def test_a_model_of_ones_own_is_named_from_the_folder_of_the_file(run_toml: Path) -> None:
    plain = run_toml.read_text()
    run_toml.write_text(plain + '\n[model]\nhf = "model"\ndim = 100\nhf_args = { learning_rate = 1e-4, bf16 = true }\n')
    assert load(run_toml).model.hf == "model", "a name of the hub: there is no such folder"
    (run_toml.parent / "model").mkdir()
    config = load(run_toml, "model.hf_args.optim=sgd")
    assert config.model.hf == str(run_toml.parent / "model")
    assert config.model.hf_args == {"learning_rate": 1e-4, "bf16": True, "optim": "sgd"}
    rows = {key: value for key, value, _ in config.rows()}
    assert rows["model.hf_args"] == '{learning_rate = 0.0001, bf16 = true, optim = "sgd"}'
    assert load(run_toml, "model.hf=model").model.hf == "model", "flags are taken from the current folder"
    assert load(run_toml, "model.hf=./model").model.hf == str(Path.cwd() / "model")
    run_toml.write_text(plain + '\n[model]\nhf = "./gone"\n')
    assert load(run_toml).model.hf == str(run_toml.parent / "gone")


def test_data_that_are_named_are_not_taken_for_paths(run_toml: Path) -> None:
    more = '[data]\npaths = ["text", "hf:owner/name"]'
    start, end = TEXT.index("[data]"), TEXT.index("\n[", TEXT.index("[data]"))
    run_toml.write_text(TEXT[:start] + more + TEXT[end:])
    data = load(run_toml).data
    assert data.paths == (str(run_toml.parent / "text"), "hf:owner/name")


def test_regions_have_names_that_shells_can_write(run_toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_REGIONS__US_EAST__ADMIN_PORT", "7600")
    config = load(run_toml)
    assert config.regions["us-east"].admin_port == 7600
    assert config.origin("regions.us-east.admin_port") == "DILOCO_REGIONS__US_EAST__ADMIN_PORT"
    assert list(config.regions) == ["eu", "us-east"]


def test_variables_for_the_learner_are_not_settings(run_toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DILOCO_SOCKET", "DILOCO_SUPERVISOR", "DILOCO_STATE", "DILOCO_TRAINER", "DILOCO_CONFIG"):
        monkeypatch.setenv(name, "/somewhere")
    assert load(run_toml) == load(run_toml)


def test_run_settings_carry_every_field(run_toml: Path) -> None:
    config = load(
        run_toml,
        "run.tokens=5000",
        "rounds.fragments=3",
        "rounds.codec_up=bf16",
        "rounds.codec_down=fp32",
        "rounds.carry=overwrite",
        "rounds.carry_steps_max=77",
        "rounds.election_timeout=1500ms",
        "rounds.ballot_deadline_min=3s",
        "rounds.overlap_steps=3",
        "rounds.quorum_min=1",
        "rounds.grace_gamma=0.5",
        "rounds.rounds_in_flight_max=1",
        "rounds.outer_lr=0.7",
        "rounds.outer_momentum=0.9",
        "rounds.weight_cap=3",
        "rounds.weight_share_max=0.75",
        "rounds.tokens_ratio_max=8",
        "rounds.payload_versions=5",
        "rounds.checkpoint_versions=6",
        "rounds.summary_entries=4096",
    )
    settings = config.run_settings()
    assert settings == RunSettings(
        fragments=3,
        sync_every=16,
        overlap_steps=3,
        quorum_min=1,
        grace_gamma=0.5,
        rounds_in_flight_max=1,
        outer_lr=0.7,
        outer_momentum=0.9,
        merge=MergeRule.AVG,
        codec_up=Codec.BF16,
        codec_down=Codec.FP32,
        carry=CarryMode.OVERWRITE,
        carry_steps_max=77,
        weight_cap=3.0,
        weight_share_max=0.75,
        tokens_ratio_max=8.0,
        tokens_max=5000,
        steps_max=400,
        heartbeat_ns=100_000_000,
        election_timeout_ns=1_500_000_000,
        ballot_deadline_min_ns=3_000_000_000,
        payload_versions=5,
        checkpoint_versions=6,
        summary_entries=4096,
    )
    # Nothing of RunSettings is out of a user's reach: all of the above differ from the defaults.
    defaults = RunSettings()
    unset = [f.name for f in dataclasses.fields(settings) if getattr(settings, f.name) == getattr(defaults, f.name)]
    assert unset == []


def test_defaults_of_the_file_are_the_defaults_of_the_core(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('run.id = "a"\n[regions.a]\n')
    assert load(path).run_settings() == RunSettings()


def test_the_outer_optimizer_follows_the_length_of_the_run_unless_it_is_set(run_toml: Path) -> None:
    for steps in (0, 400, 1_000_000):
        settings = load(run_toml, f"run.steps={steps}").run_settings()
        assert (settings.outer_lr, settings.outer_momentum) == default_outer(steps // 16)
    settings = load(run_toml, "rounds.outer_lr=1", "rounds.outer_momentum=0").run_settings()
    assert (settings.outer_lr, settings.outer_momentum) == (1.0, 0.0)
    rows = {key: (value, origin) for key, value, origin in load(run_toml, "rounds.outer_lr=1").rows()}
    assert rows["rounds.outer_lr"] == ("1.0", "--set rounds.outer_lr=1")
    assert rows["rounds.outer_momentum"] == (repr(default_outer(400 // 16)[1]), "default")


def test_the_settings_digest_tells_what_regions_must_agree_on(run_toml: Path) -> None:
    digest = load(run_toml).settings_digest()
    assert digest == load(run_toml, "regions.eu.admin_port=1", "run.state_dir=x", "model.lr=0.1").settings_digest()
    for change in ("rounds.fragments=17", "run.steps=401", "rounds.carry=overwrite", "rounds.heartbeat=101ms"):
        assert load(run_toml, change).settings_digest() != digest


def test_the_config_can_not_be_changed(run_toml: Path) -> None:
    config = load(run_toml)
    with pytest.raises(ValueError, match="frozen"):
        config.run = config.run  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("address", "listen", "place"),
    [
        ("10.1.2.3:7400", None, ("0.0.0.0", 7400)),
        ("us.example.org:7400", None, ("0.0.0.0", 7400)),
        ("127.0.0.1:7401", None, ("127.0.0.1", 7401)),
        ("localhost:7402", None, ("localhost", 7402)),
        ("[fd00::1]:7403", None, ("::", 7403)),
        ("10.1.2.3:7400", "10.9.9.9:7405", ("10.9.9.9", 7405)),
        ("10.1.2.3:7400", "[::1]:7405", ("::1", 7405)),
    ],
)
def test_what_a_region_binds(run_toml: Path, address: str, listen: str | None, place: tuple[str, int]) -> None:
    more = [f"regions.eu.listen={listen}"] if listen else []
    assert load(run_toml, f"regions.eu.address={address}", *more).listen("eu") == place


def test_a_region_without_address_binds_any_port_on_loopback(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nid = "a"\n[regions.a]\n[regions.b]\naddress = "b:1"\n')
    assert load(path).listen("a") == ("127.0.0.1", 0)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "phrases"),
    [
        ("rounds.sync_evry=3", ["rounds.sync_evry (--set", "is not a setting, did you mean sync_every?"]),
        ("rounds.zzz=3", ["rounds.zzz", "is not a setting; [rounds] has fragments, sync_every,"]),
        ("roonds.x=1", ["[roonds] (--set", "did you mean rounds?"]),
        ("rounds.sync_every=abc", ['rounds.sync_every is "abc" (--set', "integer; for example sync_every = 24"]),
        ("rounds.sync_every=0", ["greater than or equal to 1; for example sync_every = 24"]),
        ("run.steps=1.5", ["run.steps", "for example steps = 0"]),
        ("rounds.merge=mean", ["it must be 'rda', 'avg' or 'trimmed'", 'merge = "rda"']),
        ("rounds.codec_up=int3", ["it must be 'int4', 'int8', 'bf16' or 'fp32'"]),
        ("rounds.heartbeat=200", ['rounds.heartbeat is "200"', 'no unit; write "200ms"']),
        ("rounds.heartbeat=400ms", ["at most a third of rounds.election_timeout, 1s"]),
        ("rounds.heartbeat=0s", ["it must be positive"]),
        ("rounds.outer_lr=nan", ["rounds.outer_lr", "finite"]),
        ("rounds.outer_momentum=1", ["less than 1"]),
        ("rounds.weight_cap=0.5", ["greater than or equal to 1"]),
        ("regions.eu.payload_archive=maybe", ["boolean"]),
        ("rounds.overlap_steps=16", ["rounds.overlap_steps is 16", "less than rounds.sync_every, 16"]),
        ("rounds.quorum_min=3", ["rounds.quorum_min is 3", "there are 2 regions"]),
        ("rounds.ballot_deadline_min=1ms", ["rounds.ballot_deadline_min", "at least rounds.heartbeat, 100ms"]),
        ("run.id=Foo", ['run.id is "Foo"', 'id = "my-run"']),
        ("model.dim=65", ["model.dim is 65", "for example 64"]),
        ("model.hf_args.bf16=true", ['model.hf_args is {bf16 = "true"}', "of no use without model.hf"]),
        ("model.hf_args=fast", ['model.hf_args is "fast"', "must be a table"]),
        ("model.shard=zero", ["it must be 'none', 'ddp' or 'fsdp'"]),
        ("regions.EU.address=a:1", ["[regions.EU] (--set", "a-z, 0-9 and '-'"]),
        ("regions.witness.address=a:1", ["[regions.witness] (--set", "not 'witness'"]),
        (f"regions.{'a' * 64}.address=a:1", ["1 to 63"]),
        ("regions.eu.adress=a:1", ["regions.eu.adress", "did you mean address?"]),
        ("regions.eu.address=foo", ["HOST:PORT", "10.0.0.1:7400"]),
        ("regions.eu.address=foo:0", ["port '0' is not from 1 to 65535"]),
        ("regions.eu.address=foo:٣", ["port '٣' is not"]),
        ("regions.eu.address=fd00::1:80", ["[fd00::1]:7400"]),
        ("regions.eu.address=http://foo:80", ["HOST:PORT"]),
        ("regions.eu.address=-oProxyCommand=x:80", ["HOST:PORT"]),
        ("regions.eu.address=-vv:80", ["HOST:PORT"]),
        ("regions.eu.address=foo;reboot:80", ["HOST:PORT"]),
        ("regions.eu.address=127.0.0.1:7400", ["regions.us-east.address", "region eu has the same address"]),
        ("regions.eu.admin_port=70000", ["less than or equal to 65535"]),
        ("regions.eu.measure_port=65536", ["less than or equal to 65535"]),
        ("regions.eu.admin_host=0.0.0.0", ["regions.eu.admin_host", "not all of them", 'admin_host = "172.20.0.2"']),
        ("regions.eu.admin_host=eu", ["regions.eu.admin_host", "as a number"]),
        ("rounds=4", ['rounds is "4"', "must be a table, [rounds]"]),
    ],
)
def test_a_bad_value_is_one_clear_error(run_toml: Path, assignment: str, phrases: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(run_toml, assignment)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in message
    assert "--set" in message or "us-east.address" in message
    for phrase in phrases:
        assert phrase in message


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["measure_port=7400"], "regions.eu.measure_port is 7400 (--set {0}): regions.eu.address ({file}:18) takes"),
        (["measure_port=7500"], "regions.eu.measure_port is 7500 (--set {0}): regions.eu.admin_port ({file}:19) takes"),
        (["admin_port=7400"], "regions.eu.admin_port is 7400 (--set {0}): regions.eu.address ({file}:18) takes"),
        (["listen=[::]:7500"], "regions.eu.admin_port is 7500 ({file}:19): regions.eu.listen (--set {0}) takes"),
        (["listen=localhost:7500"], "regions.eu.admin_port is 7500 ({file}:19): regions.eu.listen (--set {0}) takes"),
        (
            ["listen=10.0.0.1:7400", "measure_port=7400"],
            "regions.eu.measure_port is 7400 (--set {1}): regions.eu.listen (--set {0}) takes",
        ),
        (
            ["listen=10.0.0.1:7500", "admin_host=10.0.0.1"],
            "regions.eu.admin_port is 7500 ({file}:19): regions.eu.listen (--set {0}) takes",
        ),
        (
            ["listen=10.0.0.1:7400", "admin_host=10.0.0.1", "measure_port=7500"],
            "regions.eu.measure_port is 7500 (--set {2}): regions.eu.admin_port ({file}:19) takes",
        ),
    ],
)
def test_a_port_that_a_region_needs_twice_is_refused(run_toml: Path, assignments: list[str], message: str) -> None:
    keys = [f"regions.eu.{name}" for name in assignments]
    with pytest.raises(ConfigError) as caught:
        load(run_toml, *keys)
    begins = message.format(*keys, file=run_toml)
    assert str(caught.value) == f"{begins} that port; choose another one, or 0 for a free one"


def test_a_port_wanted_twice_is_found_across_sources(run_toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_REGIONS__EU__MEASURE_PORT", "7600")
    assert load(run_toml).regions["eu"].measure_port == 7600
    with pytest.raises(
        ConfigError, match=r"measure_port is 7600 \(DILOCO_.*\): regions.eu.admin_port \(--admin-port\)"
    ):
        load_config(run_toml, [Flag("regions.eu.admin_port", 7600, "--admin-port")])


@pytest.mark.parametrize(
    "assignments",
    [
        ["measure_port=0", "admin_port=0"],
        ["listen=10.0.0.1:7500"],  # admin is on loopback
        ["listen=10.0.0.1:7400", "measure_port=7500"],
        ["listen=0.0.0.0:7401", "measure_port=7400"],  # the address is of a router before it
        ["admin_host=10.0.0.1"],
    ],
)
def test_a_port_that_is_bound_once_at_each_place_is_taken(run_toml: Path, assignments: list[str]) -> None:
    load(run_toml, *(f"regions.eu.{assignment}" for assignment in assignments))


def test_an_error_in_the_file_names_its_line(run_toml: Path) -> None:
    run_toml.write_text(TEXT.replace("sync_every = 16", "sync_every = true"))
    with pytest.raises(ConfigError, match=rf"rounds.sync_every is true \({run_toml}:7\): it must be a whole number"):
        load(run_toml)
    run_toml.write_text(TEXT.replace('heartbeat = "100ms"', "heartbeat = 100"))
    with pytest.raises(ConfigError, match=rf"rounds.heartbeat is 100 \({run_toml}:8\): it has no unit"):
        load(run_toml)
    run_toml.write_text(TEXT.replace("[data]", "[dato]"))
    with pytest.raises(ConfigError, match=rf"\[dato\] \({run_toml}:12\) is no section of run.toml, did you mean data"):
        load(run_toml)


def test_several_errors_are_all_named(run_toml: Path) -> None:
    with pytest.raises(ConfigError, match=r"rounds.sync_every is .*\(also wrong: rounds.merge, model.dim\)|also wrong"):
        load(run_toml, "rounds.sync_every=0", "rounds.merge=x", "model.dim=1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no regions: add"),
        ('[regions.a]\naddress = "a:1"\n', 'run.id is not set: add id = "my-run" under'),
        ('run = 3\n[regions.a]\naddress = "a:1"\n', "run is 3 .*must be a table"),
        ("regions = 3\n", "no regions"),
        ("a = = 3\n", "not valid TOML.*line 1"),
        ('run.id = "a"\n[regions.a]\n[regions.b]\n', "regions a and b have no address"),
        ("x" * ((1 << 20) + 1), "more than 1048576 bytes"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist: name the run's settings with --config"):
        load(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="can't be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DILOCO_ROUNDS__SYNC_EVRY", "3", r"\(DILOCO_ROUNDS__SYNC_EVRY\) is not a setting, did you mean sync_every"),
        ("DILOCO_ROONDS__SYNC_EVERY", "3", "there is no section 'roonds'"),
        ("DILOCO_SYNC_EVERY", "3", "set DILOCO_ROUNDS__SYNC_EVERY instead"),
        ("DILOCO_ROUNDS__SYNC_EVERY", "x", r'is "x" \(DILOCO_ROUNDS__SYNC_EVERY\)'),
        ("DILOCO_ROUNDS", '{"a', "can't be read"),
    ],
)
def test_bad_variables_are_refused(
    run_toml: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        load(run_toml)


def test_only_known_regions_can_be_started(run_toml: Path) -> None:
    config = load(run_toml)
    config.check_region("eu")
    with pytest.raises(
        ConfigError, match=r"'us-eat' is not in \[regions\], did you mean us-east\?; there are eu, us-east"
    ):
        config.check_region("us-eat")


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused_with_a_config_error(text: str) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        with pytest.raises(ConfigError):
            load(path)


@given(
    st.sampled_from([*RoundsSection.model_fields]),
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=2)
    ),
)
def test_any_value_is_taken_or_refused_with_a_config_error(name: str, value: object) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(TEXT)
        message = f"rounds.{name}"
        try:
            load_config(path, [Flag(f"rounds.{name}", value, "--set")])
        except ConfigError as error:
            message = str(error)
    assert "rounds." in message


def test_every_field_has_a_default_that_is_valid() -> None:
    for section in (RoundsSection, ModelSection):
        values = {name: field.default for name, field in section.model_fields.items()}
        assert section(**values) == section()


@given(st.integers(0, 10**9))
def test_defaults_are_stable_for_any_length_of_run(cycles: int) -> None:
    lr, mu = default_outer(cycles)
    assert 0.0 < lr <= 1.0
    assert 0.0 <= mu < 1.0
    # The step that a constant gradient ends up with, lr / (1 - mu), stays within what was ever tried to work.
    assert lr / (1.0 - mu) <= 4.0
