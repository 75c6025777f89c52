"""`measure` without a daemon: who we are, where the others are, and the measurement on links of our own."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from diloco_node.errors import BindError, ConfigError, LinkLost, PeersUnreachable, StorageError
from diloco_node.escaping import escaped_document

if TYPE_CHECKING:
    from diloco_node.config.resolve import NodeConfig
    from diloco_node.measure.measurement import OnPartial
    from diloco_node.transport.certificates import Identity

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Here:
    """This end: our certificate, and run.toml. name: of our region."""

    name: str
    identity: Identity
    config: NodeConfig

    @classmethod
    def find(cls, config: Path | None, region: str | None) -> Here:
        """From flags, run.toml, and the keys that lie here. Raises ConfigError: none was chosen. IdentityError."""
        from diloco_node.cli.options import load
        from diloco_node.transport.certificates import load_identity

        settings = load(config)
        if region is not None:
            settings.check_region(region)
        folder = own_folder(settings.run.certs_dir, region)
        identity = load_identity(folder, region=region, run_id=settings.run.id)
        settings.check_region(identity.region)
        return cls(identity.region, identity, settings)

    def listen(self) -> tuple[str, int]:
        """Return what `measure serve` binds."""
        host, port = self.config.listen(self.name)
        return host, self.config.regions[self.name].measure_port or port

    def addresses(self) -> dict[str, str]:
        """Where `measure serve` of the other regions is dialed, of those that can be."""
        addresses = {}
        for name, region_settings in self.config.regions.items():
            if region_settings.address is not None and name != self.name:
                host, _, port = region_settings.address.rpartition(":")
                addresses[name] = f"{host}:{region_settings.measure_port or port}"
        return addresses

    def others(self) -> tuple[str, ...]:
        """The other regions of run.toml."""
        return tuple(name for name in self.config.regions if name != self.name)


def own_folder(certs: Path, region: str | None) -> Path:
    """The folder of our key: of the region, the only one there is, or `certs` itself."""
    if (certs / "node.key").exists():
        return certs
    if region is not None:
        return certs / region
    folders = sorted(path.parent for path in certs.glob("*/node.key"))
    if len(folders) > 1:
        names = ", ".join(path.name for path in folders)
        raise ConfigError(f"{certs} has the keys of {names}: say who we are with --region NAME")
    return folders[0] if folders else certs  # whose files are missing, as load_identity will say


async def serve(here: Here, on_listening: Callable[[dict[str, Any]], None]) -> None:
    """Answer measurements until SIGINT or SIGTERM. Raises BindError: the port is taken."""
    from diloco_node.daemon.logs import set_up_logs
    from diloco_node.measure.ends import Dialer, measuring_end

    set_up_logs()
    # It logs a traceback for each call that its dialing side has left meanwhile, which is how every link ends.
    logging.getLogger("grpc").setLevel(logging.CRITICAL)
    where, dial = here.listen(), Dialer(here.identity, here.addresses())
    end = measuring_end(here.identity, dict.fromkeys(here.others()), listen=where, dial=dial)
    try:
        async with end as serving:
            on_listening({"region": here.name, "host": where[0], "port": serving.transport.port})
            stop = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            await stop.wait()
    except BindError as error:
        raise BindError(
            f"{error} Beside a running daemon `measure serve` needs a port of its own: measure_port in "
            f"[regions.{here.name}]"
        ) from None


async def measure(here: Here, document: Mapping[str, Any], on_partial: OnPartial) -> dict[str, Any]:
    """Measure on links of our own to `measure serve` of the peers.

    Args:
        document: see `measure.measurement.parse_request`. on_partial: called with the results so far.

    Raises ConfigError, IdentityError, PeersUnreachable, PeerError: nothing could be measured.
    """
    from diloco_node.measure.ends import Dialer
    from diloco_node.measure.measurement import MeasureCommand

    request, addresses = dict(document), here.addresses()
    hidden: tuple[str, ...] = ()
    if request["what"] == "mesh":
        hidden = tuple(name for name in here.others() if name not in addresses)
        peers = tuple(addresses)
        if not peers:
            reason = _hidden_reason(hidden[0]) if hidden else "there is one region in run.toml: a mesh needs two"
            raise ConfigError(reason)
    else:
        peer = request["peer"]
        if peer not in here.others():
            raise ConfigError(f"PEER is {peer!r}: write another region of run.toml, one of {', '.join(here.others())}")
        if peer not in addresses:
            raise ConfigError(f"{peer} has no address in run.toml: measure from there, with --reverse for this way")
        peers = (peer,)
    command = MeasureCommand(here.name, peers, Dialer(here.identity, addresses))
    with _quiet(), progress(str(request["what"])) as on_progress:
        result = await command.run(request, on_progress, lambda so_far: on_partial(with_hidden(so_far, hidden)))
        return dict(escaped_document(with_hidden(result, hidden)))


def with_hidden(mesh: Mapping[str, Any], hidden: Sequence[str]) -> dict[str, Any]:
    """The document with the pairs of regions that nobody can dial, which were left out."""
    if not hidden:
        return dict(mesh)
    names = sorted({*mesh["regions"], *hidden})
    lacking = [
        {"from": a, "to": b, "error": _hidden_reason(a if a in hidden else b)}
        for a in names
        for b in names
        if a != b and {a, b} & set(hidden)
    ]
    return {**mesh, "regions": names, "failures": [*mesh["failures"], *lacking]}


def _hidden_reason(region: str) -> str:
    return (
        f"{region} has no address, so nobody can ask it to measure: run `diloco-node measure mesh` in {region}, and "
        "`measure serve` in the others"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log of the links: here errors are raised."""
    import structlog

    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run on the loop that the daemon uses. A link that breaks on the way ends with exit code 5."""
    import uvloop

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(work())
    except LinkLost as error:
        raise PeersUnreachable(str(error)) from error


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """A line on the terminal that tells what is going on, and for how long; nothing where standard error is none."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), "{task.description}", TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)

        def on_progress(now: str) -> None:
            if bar.tasks[0].description != now:
                bar.reset(task, description=now)

        yield on_progress


def check_writable(path: Path) -> None:
    """Refuse a file that can't be written, with ConfigError. A new file is removed again."""
    try:
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--out {path} can't be written ({error.strerror})") from error


def write(path: Path, text: str) -> None:
    """Write a result. Raises StorageError."""
    try:
        path.write_text(text)
    except OSError as error:
        raise StorageError(f"--out {path} can't be written ({error.strerror}): what was measured is above") from error
