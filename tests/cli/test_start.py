import dataclasses
import json
import re
import socket
import sys
from pathlib import Path

import pytest

from diloco_node.cli import start as start_cmd
from diloco_node.config.resolve import NodeConfig, load_config
from diloco_node.config.sources import Flag
from diloco_node.daemon.spec import NodeSpec
from diloco_node.errors import BindError, ConfigError
from diloco_node.lab.demo.region_processes import free_ports
from diloco_node.learner.attach import ON_SPIKE_VARIABLE
from diloco_node.learner.builtin.trainer import SETTINGS_VARIABLE, TrainerSettings, read_settings_file, settings_from
from diloco_node.learner.daemon_session import ENCODER_VARIABLE
from diloco_node.main import main
from diloco_node.supervisor.preload import forkable_command
from diloco_node.supervisor.supervisor import run_supervisor
from diloco_node.supervisor.supervisor_spec import SupervisorSpec
from diloco_node.transport.authority import init_run
from tests.kit.commands import run_command
from tests.kit.ports import free_port

RUN_TOML = """
[run]
id = "try"
seed = 7
[model]
batch = 4
context = 32
step_time_min = "50ms"
[data]
paths = ["text.txt"]
[regions.eu]
address = "127.0.0.1:{eu}"
[regions.us-east]
address = "10.0.0.2:7400"
admin_port = 7500
[regions.us-west]
"""


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_TOML.replace("{eu}", str(free_port())))
    (tmp_path / "text.txt").write_text("text\n" * 100)
    init_run(tmp_path / "certs", "try", ["eu", "us-east", "us-west"])


def resolve(*flags: Flag) -> NodeConfig:
    return load_config(Path("run.toml"), flags)


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[SupervisorSpec]:
    """What start would supervise; the supervisor itself has its own tests."""
    calls: list[SupervisorSpec] = []

    def fake(spec: SupervisorSpec) -> int:
        calls.append(spec)
        return 6

    monkeypatch.setattr("diloco_node.supervisor.supervisor.run_supervisor", fake)
    return calls


def test_start_writes_what_daemon_and_trainer_read(
    tmp_path: Path, specs: list[SupervisorSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["start", "--region", "eu", "--set", "rounds.sync_every=8"]) == 6  # the supervisor's
    (spec,) = specs
    folder = tmp_path / "state" / "eu"
    assert (spec.region, spec.state_dir) == ("eu", folder)
    assert spec.daemon_command == [sys.executable, "-P", "-m", "diloco_node.daemon", str(folder / "node.json")]
    assert spec.learner_command == [sys.executable, "-P", "-m", "diloco_node.learner"]
    assert spec.env == {
        "DILOCO_TRAINER": str(folder / "trainer.json"),
        "DILOCO_SPIKES": "warn",
        "DILOCO_ENCODER": "host",
        "DILOCO_PLACE": "0/3",
    }
    assert spec.hang_s == 300.0
    assert spec.stop_s == 25.0
    config = resolve(Flag("rounds.sync_every", 8, "--set"))
    node = NodeSpec.load(folder / "node.json")
    assert node.settings == config.run_settings()
    assert node.settings.sync_every == 8
    assert node.settings_digest == config.settings_digest()
    assert node.regions == ("eu", "us-east", "us-west")
    assert node.peers == {"us-east": "10.0.0.2:7400", "us-west": None}
    assert (node.listen_host, node.listen_port) == config.listen("eu")
    assert node.identity_dir == tmp_path / "certs" / "eu"
    assert node.run_id == "try"
    trainer = json.loads((folder / "trainer.json").read_text())
    assert trainer["data"]["paths"] == [str(tmp_path / "text.txt")]
    assert (trainer["model"]["batch"], trainer["run"]["seed"], trainer["model"]["step_time_min"]) == (4, 7, 0.05)
    assert capsys.readouterr().err == ""


READ_SETTINGS = """
import sys
from pathlib import Path
from diloco_node.config.resolve import load_config
try:
    load_config(Path(sys.argv[1]))
except Exception as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


def test_what_start_sets_for_its_children_stands_in_the_way_of_no_settings(
    tmp_path: Path, specs: list[SupervisorSpec]
) -> None:
    """A daemon reads run.toml again at SIGHUP, and a training script may call diloco-node."""
    assert main(["start", "--region", "eu"]) == 6
    daemon = [sys.executable, "-c", READ_SETTINGS, str(tmp_path / "run.toml")]
    spec = dataclasses.replace(specs[0], daemon_command=daemon, learner_command=None, preload=(), is_echoing=False)
    assert (run_supervisor(spec), (spec.state_dir / "logs" / "daemon.log").read_text()) == (0, "")


TRAINER, DYNAMO, WARM = "diloco_node.learner.builtin.trainer", "torch._dynamo", "diloco_node.learner.warm"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@pytest.mark.parametrize(
    ("arguments", "preload"),
    [
        ([], (TRAINER, WARM)),
        (["--preload", ""], ()),
        (["--preload", "torch, transformers"], ("torch", "transformers", DYNAMO, WARM)),
        (["--", sys.executable, "train.py"], ()),
        (["--set", "learner.preload=torch", "--", sys.executable, "train.py"], ("torch", DYNAMO, WARM)),
        # What starts its ranks itself can't be forked: the supervisor says so to who would expect it.
        (["--set", "model.ranks=2"], (TRAINER, WARM)),
        (["--set", "model.ranks=2", "--preload="], ()),
        (["--preload", "torch", "--", *TORCHRUN, "train.py"], ("torch", DYNAMO, WARM)),
        (["--", *TORCHRUN, "train.py"], ()),
    ],
)
def test_what_is_preloaded(specs: list[SupervisorSpec], arguments: list[str], preload: tuple[str, ...]) -> None:
    Path("train.py").touch()
    assert main(["start", "--region", "eu", *arguments]) == 6
    assert specs[0].preload == preload


def test_several_ranks_of_the_built_in_trainer_are_started_by_torchrun(specs: list[SupervisorSpec]) -> None:
    assert main(["start", "--region", "eu", "--set", "model.ranks=2", "--set", "model.shard=fsdp"]) == 6  # as above
    spec = specs[0]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert spec.learner_command == [sys.executable, "-P", *launcher, "-m", "diloco_node.learner"]
    assert spec.env["PYTHONSAFEPATH"] == "1", "of each rank"
    assert spec.learner_command is not None
    assert forkable_command(spec.learner_command) == (
        0,
        "torch.distributed.run starts its ranks itself, each as a process of its own",
    )
    assert json.loads(Path(spec.env["DILOCO_TRAINER"]).read_text())["model"]["shard"] == "fsdp"


def test_what_is_no_module_is_not_preloaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["start", "--region", "eu", "--preload", "torch,my-model.py"]) == 2
    assert "learner.preload is \"torch,my-model.py\" (--preload): 'my-model.py' is not the name of a module" in (
        capsys.readouterr().err
    )


def test_what_follows_a_spike_and_when_a_learner_hangs_can_be_set(
    specs: list[SupervisorSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["start", "--region", "eu", "--set", "learner.on_spike=rollback", "--set", "learner.hang=0s"]) == 6
    assert (specs[0].env["DILOCO_SPIKES"], specs[0].hang_s) == ("rollback", 0.0)
    assert main(["start", "--region", "eu", "--set", "learner.on_spike=panic"]) == 2
    assert "learner.on_spike" in capsys.readouterr().err


def test_the_log_is_set_by_flags_and_the_terminal_is_quiet_unless_asked(specs: list[SupervisorSpec]) -> None:
    assert main(["start", "--region", "eu", "--set", "log.format=json", "--set", "log.level=warning", "-v"]) == 6
    (spec,) = specs
    assert (spec.log_format, spec.is_verbose, spec.is_echoing) == ("json", True, True)
    node = NodeSpec.load(spec.state_dir / "node.json")
    assert (node.log_format, node.log_level, node.history_every_s) == ("json", "warning", 2.0)
    assert main(["start", "--region", "eu", "--set", "history.every=5s"]) == 6
    assert not specs[1].is_verbose
    assert NodeSpec.load(spec.state_dir / "node.json").history_every_s == 5.0
    assert main(["start", "--region", "eu", "--set", "log.level=loud"]) == 2


def test_a_command_of_the_users_takes_the_trainers_place(specs: list[SupervisorSpec], tmp_path: Path) -> None:
    (tmp_path / "text.txt").unlink()  # the built-in trainer's data does not matter then
    Path("train.py").touch()
    assert main(["start", "--region", "eu", "--", sys.executable, "train.py", "--config", "x", "--debug"]) == 6
    assert specs[0].learner_command == [sys.executable, "train.py", "--config", "x", "--debug"]


def test_flags_of_start_become_settings_of_its_region(specs: list[SupervisorSpec], tmp_path: Path) -> None:
    port, admin = free_ports(2)
    init_run(tmp_path / "c2", "try", ["us-west"])
    arguments = ["--state-dir", "s2", "--certs", "c2", "--admin-port", str(admin), "--listen", f"127.0.0.1:{port}"]
    assert main(["start", "--region", "us-west", *arguments, "--data", "run.toml", "--data", "text.txt"]) == 6
    node = NodeSpec.load(tmp_path / "s2" / "us-west" / "node.json")
    assert (node.listen_port, node.admin_port) == (port, admin)
    assert node.identity_dir == tmp_path / "c2" / "us-west"
    trainer = json.loads((tmp_path / "s2" / "us-west" / "trainer.json").read_text())
    assert trainer["data"]["paths"] == [str(tmp_path / "run.toml"), str(tmp_path / "text.txt")]


def test_two_regions_are_warned(
    specs: list[SupervisorSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(
        f'run.id = "try"\n[regions.eu]\naddress = "127.0.0.1:{free_port()}"\n[regions.us-east]\naddress = "b:1"\n'
    )
    assert main(["start", "--region", "eu"]) == 6
    assert "of two regions neither merges alone" in capsys.readouterr().err
    text = (tmp_path / "run.toml").read_text().replace("[regions.us-east]", "joined = 1\n[regions.us-east]")
    (tmp_path / "run.toml").write_text(text)
    assert main(["start", "--region", "eu"]) == 6
    assert "of two regions" not in capsys.readouterr().err, "one alone votes, and this one joins it"


def test_regions_draw_different_seeds_from_one(tmp_path: Path) -> None:
    config = resolve()
    seeds = [start_cmd.node_spec(config, name, tmp_path).seed for name in config.regions]
    assert len(set(seeds)) == 3
    assert start_cmd.node_spec(config, "eu", tmp_path).seed == seeds[0]


def test_a_region_may_keep_everything_for_replay(tmp_path: Path) -> None:
    config = resolve(Flag("regions.eu.payload_archive", "true", "--set"))
    nodes = {name: start_cmd.node_spec(config, name, tmp_path) for name in config.regions}
    assert {name: node.payload_archive for name, node in nodes.items()} == {
        "eu": True,
        "us-east": False,
        "us-west": False,
    }
    assert len({node.settings_digest for node in nodes.values()}) == 1
    nodes["eu"].save(tmp_path / "node.json")
    assert NodeSpec.load(tmp_path / "node.json") == nodes["eu"]


def test_the_trainer_reads_what_start_has_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_cmd.prepare(resolve(Flag("model.schedule_steps", "70", "--set")), "eu", [])
    assert SETTINGS_VARIABLE == start_cmd.TRAINER_VARIABLE
    assert ON_SPIKE_VARIABLE == start_cmd.ON_SPIKE_VARIABLE
    assert ENCODER_VARIABLE == start_cmd.ENCODER_VARIABLE
    monkeypatch.setenv(SETTINGS_VARIABLE, str(tmp_path / "state/eu/trainer.json"))
    settings = settings_from(read_settings_file())
    text = (str(tmp_path / "text.txt"),)
    assert settings == TrainerSettings(
        batch=4, context=32, step_time_min=0.05, schedule_steps=70, paths=text, seed=7
    ), "all others have the same defaults in the schema and in the trainer"


def test_the_package_of_this_folder_is_the_daemons_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a checkout that is not installed would have another daemon, or none."""
    monkeypatch.chdir(Path(start_cmd.__file__).parents[2])
    assert start_cmd.python_apart() == [sys.executable]


def test_a_model_of_hugging_face_is_trained_by_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    flags = {"model.hf": "model", "data.paths": ["hf:owner/name", "text.txt"], "model.hf_args.bf16": "true"}
    config = resolve(*(Flag(key, value, "--set") for key, value in flags.items()))
    settings = start_cmd.trainer_settings(config)
    assert (settings["model"]["hf"], settings["model"]["hf_args"]) == (str(tmp_path / "model"), {"bf16": "true"})
    assert settings["data"]["paths"] == ["hf:owner/name", str(tmp_path / "text.txt")]
    assert start_cmd.trainer_command(config) == [sys.executable, "-P", "-m", start_cmd.RECIPE_MODULE]
    assert start_cmd.preload_modules(config, ()) == (start_cmd.RECIPE_MODULE, DYNAMO, WARM)
    assert start_cmd.preload_modules(config, ["python", "train.py"]) == ()
    config = resolve(Flag("model.hf", "owner/name", "--set"), Flag("model.ranks", "2", "--set"))
    assert start_cmd.trainer_settings(config)["model"]["hf"] == "owner/name"
    assert start_cmd.trainer_command(config)[-2:] == ["-m", start_cmd.RECIPE_MODULE]


def test_a_model_that_is_not_there_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(Flag("model.hf", str(tmp_path), "--set model.hf"))
    with pytest.raises(ConfigError, match=r"--set model\.hf\) is no folder with a config\.json"):
        start_cmd.check_model(config)
    # What transformers would take in silence: a folder where the command is typed, not beside run.toml.
    config = resolve(Flag("model.hf", "gpt2", "--set model.hf"))
    Path("gpt2").mkdir()
    with pytest.raises(ConfigError, match=rf"gpt2 of the model hub, but .* {Path.cwd() / 'gpt2'} for it"):
        start_cmd.check_model(config)
    assert resolve(Flag("model.hf", "gpt2", "--set model.hf")).model.hf == str(Path.cwd() / "gpt2")
    config = resolve(Flag("model.hf", str(tmp_path), "--set model.hf"))
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(start_cmd.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs transformers: pip install 'diloco-node\[hf\]'"):
        start_cmd.check_model(config)
    start_cmd.check_model(resolve())


def test_what_the_recipe_refuses_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], specs: list[SupervisorSpec]
) -> None:
    """The recipe's last line, in whatever words. Its own are in tests/integrations/test_hf_recipe.py."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "sour_recipe.py").write_text("import sys; sys.exit('a warning\\nlearner: model.hf_args: too sour')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(start_cmd, "RECIPE_MODULE", "sour_recipe")
    monkeypatch.setattr(start_cmd, "RECIPE_LIBRARIES", ())
    assert main(["start", "--region", "eu", "--set", "model.hf=model"]) == 2
    assert re.fullmatch(r"diloco-node: model\.hf_args: too sour \(E-CONFIG; .*\)\n", capsys.readouterr().err)
    assert specs == []


@pytest.mark.e2e  # two processes that import transformers
@pytest.mark.long  # of the gate are the test above, and tests/integrations/test_hf_recipe.py
def test_an_unknown_argument_of_the_model_is_named_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], specs: list[SupervisorSpec]
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    arguments = ["--region", "eu", "--set", "model.hf=model", "--set"]
    assert main(["start", *arguments, "model.hf_args.learning_rat=1e-4"]) == 2
    output = capsys.readouterr().err
    assert "model.hf_args: learning_rat is no field of TrainingArguments" in output
    assert output.count("\n") == 1
    assert main(["start", *arguments, "model.hf_args.learning_rate=1e-4"]) == 6
    assert len(specs) == 1


# ---- what is refused, and with which exit code -----------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["start", *arguments])
    return code, capsys.readouterr().err


def test_an_unknown_region(capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refused(capsys, "--region", "us-eats")
    assert (code, "did you mean us-east?" in message) == (2, True)
    code, message = refused(capsys, "--region", "a.b")
    assert (code, "'a.b' is not in [regions]" in message) == (2, True)
    code, message = refused(capsys, "--region", "us-eats", "--admin-port", "7")
    assert (code, "us-eats" in message) == (2, True)


def test_a_missing_data_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").unlink()
    code, message = refused(capsys, "--region", "eu")
    assert code == 2
    assert "text.txt (run.toml:10) does not exist; give files or folders" in message
    code, message = refused(capsys, "--region", "eu", "--data", "nope")
    assert (code, "data.paths: nope (--data) does not exist" in message) == (2, True)
    code, message = refused(capsys, "--region", "eu", "--data", "hf:owner/name")
    assert (code, "data.paths: hf:owner/name (--data) wants model.hf" in message) == (2, True)
    for more in (["--data", "run.toml"], ["--set", "model.hf=owner/name", "--set", "data.paths="]):
        code, message = refused(capsys, "--region", "eu", *more, "--set", "data.streaming=true")
        assert (code, "data.streaming (--set data.streaming) wants model.hf, and as data.paths" in message) == (2, True)
    assert not (tmp_path / "state").exists()


def test_a_missing_command_or_first_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refused(capsys, "--region", "eu", "--", "no-such-torchrun")
    assert (code, "'no-such-torchrun' is not found" in message) == (2, True)
    Path("train.py").write_text("")
    for command in ("train.py", "./train.py"):
        code, message = refused(capsys, "--region", "eu", "--", command)
        assert (code, f"{command!r} is no program; write its interpreter" in message) == (2, True)
    code, message = refused(capsys, "--region", "eu", "--init", "no.safetensors")
    assert (code, "run.init: no.safetensors (--init) does not exist" in message) == (2, True)


def test_a_wrong_or_missing_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refused(capsys, "--region", "eu", "--certs", "elsewhere")
    assert code == 4
    assert "certs init" in message
    (tmp_path / "certs/eu").rename(tmp_path / "certs/old")
    (tmp_path / "certs/us-east").rename(tmp_path / "certs/eu")
    code, message = refused(capsys, "--region", "eu")
    assert (code, "us-east" in message) == (4, True)


def test_a_taken_port(capsys: pytest.CaptureFixture[str], specs: list[SupervisorSpec]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        code, message = refused(capsys, "--region", "eu", "--listen", f"127.0.0.1:{port}")
        assert code == 3
        assert f"127.0.0.1:{port} can't be bound (Address already in use)" in message
        assert "regions.eu.listen or --listen" in message
        code, message = refused(capsys, "--region", "eu", "--admin-port", str(port))
        assert (code, "--admin-port" in message) == (3, True)
    assert specs == []


def test_a_port_that_another_process_would_share_is_taken() -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with pytest.raises(BindError):
            start_cmd.check_port("127.0.0.1", sock.getsockname()[1], "x")
    start_cmd.check_port("127.0.0.1", 0, "x")


def test_an_address_of_another_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refused(capsys, "--region", "eu", "--listen", "192.0.2.1:7400")
    assert (code, "192.0.2.1:7400 can't be bound" in message) == (3, True)


def test_a_state_folder_that_can_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state").write_text("a file")
    code, message = refused(capsys, "--region", "eu")
    assert (code, "set --state-dir" in message) == (6, True)


def test_start_in_a_process_of_its_own_ends_with_one_line() -> None:
    process = run_command("start", "--region", "eu", "--certs", "elsewhere")
    assert process.returncode == 4
    assert process.stderr.count("\n") == 1
    assert process.stderr.startswith("diloco-node: ")
