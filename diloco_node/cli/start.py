"""`diloco-node start`: check everything that can be checked at once, then become the region's supervisor."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from diloco_node.cli.existing_state import check_begun, full_place
from diloco_node.cli.options import ConfigOption, SetOption, load
from diloco_node.errors import BindError, ConfigError, StorageError
from diloco_node.integrations.weight_files import check_hub_name
from diloco_node.state_names import DAEMON_SOCKET_NAME, MEMORY_SOCKET_NAME, NODE_NAME, TRAINER_NAME

if TYPE_CHECKING:
    from diloco_node.config.resolve import NodeConfig
    from diloco_node.daemon.spec import NodeSpec
    from diloco_node.supervisor.supervisor_spec import SupervisorSpec

TRAINER_PRELOAD: Final = ("diloco_node.learner.builtin.trainer",)
TRAINER_MODULE: Final = "diloco_node.learner"
RECIPE_MODULE: Final = "diloco_node.integrations.hf_recipe"
RECIPE_LIBRARIES: Final = ("transformers", "accelerate", "datasets", "torchdata")
LATE_IMPORTS: Final = "diloco_node.learner.warm"
"""Preloaded beside whatever is: what every learner needs, and would else do after the fork."""

DYNAMO: Final = "torch._dynamo"
"""Imported by torch's optimizers when they are made, and by what compiles: a second of processor time."""

TRAINER_VARIABLE: Final = "DILOCO_TRAINER"
ON_SPIKE_VARIABLE: Final = "DILOCO_SPIKES"
ENCODER_VARIABLE: Final = "DILOCO_ENCODER"
"""No name of a setting: settings are read with it in the environment, and without a section they are refused."""

PLACE_VARIABLE: Final = "DILOCO_PLACE"


def start(
    *,
    region: Annotated[str, typer.Option("--region", "-r", metavar="NAME", help="Which region this is.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND...]", help="Your training command; default: the built-in trainer."),
    ] = None,
    config: ConfigOption = None,
    state_dir: Annotated[Path | None, typer.Option("--state-dir", help="Folder of all regions' state.")] = None,
    certs_dir: Annotated[Path | None, typer.Option("--certs", help="Folder that certs init made.")] = None,
    advertise: Annotated[
        str | None, typer.Option("--advertise", metavar="HOST:PORT", help="Where the other regions dial this one.")
    ] = None,
    listen: Annotated[str | None, typer.Option("--listen", metavar="HOST:PORT", help="What to bind.")] = None,
    admin_port: Annotated[
        int | None, typer.Option("--admin-port", min=0, max=65_535, help="Status and metrics on loopback.")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", metavar="PATH", help="Text for the built-in trainer.")
    ] = None,
    preload: Annotated[
        str | None, typer.Option("--preload", metavar="MODULE,...", help="Imported once; restarted learners fork.")
    ] = None,
    init: Annotated[str | None, typer.Option("--init", metavar="FILE", help="First parameters, safetensors.")] = None,
    join: Annotated[
        str | None,
        typer.Option(
            "--join", metavar="HOST:PORT", help="Join a run that goes on: any member's address. Writes run.toml."
        ),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="A finished run, without a learner: until no other region lacks its end."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the daemon's log here, too.")] = False,
    assignments: SetOption = None,
) -> None:
    """Run one region: a daemon and its learner, restarted when they die. Ends with the run, or at SIGTERM."""
    flags = {
        "run.state_dir": ("--state-dir", state_dir),
        "run.certs_dir": ("--certs", certs_dir),
        "run.init": ("--init", init),
        f"regions.{region}.address": ("--advertise", advertise),
        f"regions.{region}.listen": ("--listen", listen),
        f"regions.{region}.admin_port": ("--admin-port", admin_port),
        "data.paths": ("--data", data),
        "learner.preload": ("--preload", preload),
    }
    if join is not None:
        from diloco_node.cli.join import join_run

        join_run(region, join, config, flags, assignments, check=partial(check_files, command=command or ()))
    # A name with a dot would become a key of its own; the check names the regions there are.
    settings = load(config, flags if "." not in region else {}, assignments)
    settings.check_region(region)
    end, changes = check_begun(settings, region)
    if end and not serve:
        from diloco_node.supervisor.service_manager import ServiceManager

        typer.echo(end)
        # Who ends before it is ready has failed, says systemd, and starts it again.
        ServiceManager(os.environ, os.getpid()).send("READY=1")
        return
    if serve and not end:
        raise ConfigError(f"--serve is for a run that is finished in {region}; this one is not: leave it out")
    if not command and not serve:
        check_data(settings)
        check_model(settings)
        if settings.model.hf is not None:
            kind = "the folder" if Path(settings.model.hf).is_absolute() else "of the model hub:"
            changes.append(f"model.hf is {kind} {settings.model.hf}")
        elif join is not None and not settings.data.paths:
            changes.append(
                "trains on the standard library's sources: --data, or data.paths in run.toml, has other text"
            )
    check_start(settings, region, command or ())
    spec = dataclasses.replace(prepare(settings, region, command or ()), is_verbose=verbose)
    if serve:
        from diloco_node.daemon.spec import NodeSpec

        # Without a learner, and with a daemon that waits for regions that lack the end of the run.
        node_file = spec.state_dir / NODE_NAME
        dataclasses.replace(NodeSpec.load(node_file), is_serving=True).save(node_file)
        spec = dataclasses.replace(spec, learner_command=None, preload=())
        changes = ["serves until all other regions have told it that they have the end; Ctrl-C ends it before"]
    for line in changes:
        sys.stderr.write(f"diloco-node: {line}\n")
    from diloco_node.supervisor.supervisor import run_supervisor

    raise typer.Exit(run_supervisor(spec))


def check_files(config: NodeConfig, command: Sequence[str]) -> None:
    """Refuse data, a model or a script that this machine lacks. Raises ConfigError."""
    if not command:
        check_data(config)
        check_model(config)
    check_command(command)
    check_init(config)


def check_data(config: NodeConfig) -> None:
    """Refuse data paths that are not there, before any process is started."""
    from diloco_node.config.sources import HUB

    for path in config.data.paths:
        if path.startswith(HUB) and config.model.hf is None:
            raise ConfigError(
                f"data.paths: {path} ({config.origin('data.paths')}) wants model.hf; the byte model reads files of text"
            )
        if not path.startswith(HUB) and not Path(path).exists():
            raise ConfigError(
                f"data.paths: {path} ({config.origin('data.paths')}) does not exist; give files or folders of text, "
                "or leave it out for the standard library's sources"
            )
    if config.data.streaming and (config.model.hf is None or not config.data.paths):
        raise ConfigError(
            f"data.streaming ({config.origin('data.streaming')}) wants model.hf, and as data.paths files of JSONL or "
            "Parquet, or hf:NAME"
        )


def check_model(config: NodeConfig) -> None:
    """Refuse a model of Hugging Face that its recipe can't train; the recipe says so itself. Raises ConfigError."""
    name = config.model.hf
    if name is None:
        return
    origin = config.origin("model.hf")
    if Path(name).is_absolute() and not (Path(name) / "config.json").is_file():
        raise ConfigError(f"model.hf: {name} ({origin}) is no folder with a config.json, and no name of the model hub")
    check_hub_name(name)
    for library in RECIPE_LIBRARIES:
        if importlib.util.find_spec(library) is None:
            raise ConfigError(f"model.hf ({origin}) needs {library}: pip install 'diloco-node[hf]'")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(trainer_settings(config), file)
        file.flush()
        recipe = subprocess.run(
            [*python_apart(), "-m", RECIPE_MODULE, "--check"],
            env=os.environ | {TRAINER_VARIABLE: file.name},
            capture_output=True,
            text=True,
            check=False,
        )
    if recipe.returncode:
        reason = (recipe.stderr.strip().splitlines() or ["it says no reason"])[-1]
        raise ConfigError(reason.removeprefix("learner: "))


def check_init(config: NodeConfig) -> None:
    """Refuse first parameters that can't be read. Raises ConfigError."""
    from diloco_node.daemon.run_record import past_of

    path = config.run.init
    if path is None or past_of(path) is not None:
        return  # an earlier version is looked for where no run has begun: `existing_state`
    if not os.path.exists(path):  # noqa: PTH110 (False where this user may not look)
        raise ConfigError(
            f"run.init: {path} ({config.origin('run.init')}) does not exist, or this user may not see it; names of the "
            "model hub are not fetched"
        )
    from diloco_node.daemon.effects.initial_files import check_initial

    check_initial(Path(path))


def check_command(command: Sequence[str]) -> None:
    """Refuse a training command whose program, or script for Python or torchrun, is not there. Raises ConfigError."""
    if command and shutil.which(command[0]) is None:
        if os.path.isfile(command[0]):  # noqa: PTH113 - `Path.is_file` raises where nobody may look
            raise ConfigError(
                f"command {command[0]!r} is no program; write its interpreter before it, as python or bash"
            )
        raise ConfigError(f"command {command[0]!r} is not found; name a program on PATH, or its full path, after --")
    scripts = (word for word in command[1:] if word.endswith(".py"))
    script = next(scripts, None) if re.match("python|torchrun", Path(command[0] if command else "").name) else None
    if script and not {"-c", "-m"} & set(command[: command.index(script)]) and not Path(script).is_file():
        raise ConfigError(f"script {script!r} is not found in {Path.cwd()}; name one that is there, after --")


def check_start(config: NodeConfig, region: str, command: Sequence[str]) -> None:
    """Refuse in one line what would stop the daemon at once. Raises ConfigError, IdentityError, BindError."""
    check_command(command)
    check_init(config)
    from diloco_node.transport.certificates import load_identity

    load_identity(config.identity_dir(region), region=region, run_id=config.run.id)
    host, port = config.listen(region)
    check_port(host, port, f"regions.{region}.listen or --listen")
    section = config.regions[region]
    for host in dict.fromkeys(("127.0.0.1", section.admin_host)):
        check_port(host, section.admin_port, f"regions.{region}.admin_port or --admin-port")


def check_port(host: str, port: int, setting: str) -> None:
    """Bind, let go. Without SO_REUSEPORT, so that it fails also where gRPC would share the port with another process.

    Raises BindError: it is taken, or the address is not this machine's.
    """
    if port == 0:
        return
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as error:
        raise BindError(
            f"{host}:{port} can't be bound ({error.strerror or error}): stop what uses it "
            f"(perhaps this region, already running), or set {setting}"
        ) from error


def prepare(config: NodeConfig, region: str, command: Sequence[str]) -> SupervisorSpec:
    """Write what daemon and trainer read into the region's folder; what to supervise. Raises StorageError."""
    from diloco_node.storage.durable import make_folder
    from diloco_node.supervisor.supervisor_spec import SupervisorSpec

    folder = config.state_dir(region).resolve()
    node_file, trainer_file = folder / NODE_NAME, folder / TRAINER_NAME
    try:
        make_folder(folder)
        node_spec(config, region, folder).save(node_file)
        trainer_file.write_text(json.dumps(trainer_settings(config), indent=1) + "\n")
    except OSError as error:
        raise StorageError(
            f"state folder {folder} can't be written ({error.strerror or error}): make room, make it writable, or set "
            "--state-dir"
        ) from error
    return SupervisorSpec(
        region=region,
        state_dir=folder,
        daemon_command=[*python_apart(), "-m", "diloco_node.daemon", str(node_file)],
        learner_command=list(command) or trainer_command(config),
        env={
            TRAINER_VARIABLE: str(trainer_file),
            ON_SPIKE_VARIABLE: config.learner.on_spike,
            ENCODER_VARIABLE: config.learner.encode,
            PLACE_VARIABLE: place_of(config, region),
            # The same as its -P, for ranks that torchrun starts.
            **({"PYTHONSAFEPATH": "1"} if not command and config.model.ranks > 1 and "-P" in python_apart() else {}),
        },
        hang_s=config.learner.hang.ns / 1e9,
        stop_s=config.learner.stop_grace.ns / 1e9,
        log_format=config.log.format,
        preload=preload_modules(config, command),
    )


def place_of(config: NodeConfig, region: str) -> str:
    """INDEX/COUNT: the region's place in the run, by its ledger; before it has one, those that joined are last."""
    from diloco_node.daemon.run_record import read_run_record

    record = read_run_record(config.state_dir(region))
    names = sorted(config.regions, key=lambda name: (config.regions[name].joined > 0, name))
    places = names if record is None else record.roster.places(region)
    return f"{list(places).index(region)}/{len(places)}"


def python_apart() -> list[str]:
    """Python that imports nothing from the folder where it is started, but for this package itself.

    A script beside run.toml that is called as a module of others is, such as queue.py, is not taken in its place.
    """
    is_from_here = Path(__file__).resolve().parents[2] == Path.cwd().resolve()
    return [sys.executable] if is_from_here else [sys.executable, "-P"]


def trainer_command(config: NodeConfig) -> list[str]:
    """Command of the built-in trainer or the recipe. torchrun starts several ranks, at a port that it chooses."""
    module = TRAINER_MODULE if config.model.hf is None else RECIPE_MODULE
    ranks = config.model.ranks
    if ranks == 1:
        return [*python_apart(), "-m", module]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*python_apart(), *launcher, "-m", module]


def preload_modules(config: NodeConfig, command: Sequence[str]) -> tuple[str, ...]:
    """Modules of the process that learners are forked from; none: they start afresh, as a launcher of ranks does."""
    trainer = TRAINER_PRELOAD if config.model.hf is None else (RECIPE_MODULE,)
    default = () if command else trainer
    modules = default if config.learner.preload is None else config.learner.preload
    dynamo = () if modules == TRAINER_PRELOAD else (DYNAMO,)
    return (*modules, *dynamo, LATE_IMPORTS) if modules else ()


def node_spec(config: NodeConfig, region: str, folder: Path) -> NodeSpec:
    """Settings of the daemon, for its file."""
    from diloco_node.daemon.spec import NodeSpec
    from diloco_node.unix_sockets import socket_path

    host, port = config.listen(region)
    section = config.regions[region]
    return NodeSpec(
        region=region,
        run_id=config.run.id,
        regions=tuple(
            name for name in config.regions if (name != region if section.joined else not config.regions[name].joined)
        ),
        listen_host=host,
        listen_port=port,
        peers={name: section.address for name, section in config.regions.items() if name != region},
        address=section.address,
        joined=section.joined,
        state_dir=folder,
        identity_dir=config.identity_dir(region).resolve(),
        admin_port=section.admin_port,
        admin_host=section.admin_host,
        payload_archive=section.payload_archive,
        log_level=config.log.level,
        log_format=config.log.format,
        history_every_s=config.history.every.ns / 1e9,
        budget=config.budget_plan(region),
        config_file=config.path.resolve(),
        learner_socket=socket_path(folder, DAEMON_SOCKET_NAME),
        supervisor_socket=socket_path(folder, MEMORY_SOCKET_NAME),
        settings=config.run_settings(),
        settings_digest=config.settings_digest(),
        founding_digest=config.founding_digest(),
        settings_shown=tuple(config.rows()),
        shared_settings=tuple(f"{key}={value}" for key, value in config.shared_settings().items()),
        joiner_settings=tuple(f"{key}={value}" for key, value in config.joiner_settings().items()),
        init=full_place(config.run.init),
        # Regions must draw different election timeouts from one seed of the run.
        seed=int.from_bytes(hashlib.sha256(f"{config.run.seed}/{region}".encode()).digest()[:4], "big"),
    )


def trainer_settings(config: NodeConfig) -> dict[str, dict[str, Any]]:
    """Settings of the trainer in the file that DILOCO_TRAINER names: sections and names are those of run.toml."""
    from diloco_node.config.sources import HUB

    run, model, data = config.run, config.model, config.data
    paths = [path if path.startswith(HUB) else str(Path(path).resolve()) for path in data.paths]
    return {
        "run": {"seed": run.seed, "steps": run.steps, "tokens": run.tokens},
        "model": model.model_dump(exclude={"step_time_min"}) | {"step_time_min": model.step_time_min.ns / 1e9},
        "data": data.model_dump() | {"paths": paths},
    }
