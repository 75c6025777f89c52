"""A run of two regions as a user has it before the start, for `doctor` to be told what is wrong with it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import io
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from diloco_node.config.resolve import load_config
from diloco_node.lab.demo.region_processes import free_ports
from diloco_node.main import main
from diloco_node.transport.authority import init_run
from diloco_node.transport.certificates import load_identity
from diloco_node.transport.transport import GrpcTransport
from tests.kit.commands import COMMAND
from tests.kit.transport_kit import FAST, Recorder

RUN = "try"
OWN, PEER = "here", "there"


class Ward:
    """run.toml and certificates in a folder, `OWN` being us. Nothing is wrong, but that nobody listens at `PEER`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.admin_port, self.peer_port = free_ports(3)
        self.config = folder / "run.toml"
        self.write(self.text())
        self.certs = folder / "certs"

    def text(self, **addresses: str) -> str:
        peer = addresses.get("peer", f"127.0.0.1:{self.peer_port}")
        return (
            f'[run]\nid = "{RUN}"\nsteps = 100\n[rounds]\nsync_every = 24\n'
            f'[regions.{OWN}]\naddress = "127.0.0.1:{self.port}"\nadmin_port = {self.admin_port}\n'
            f'[regions.{PEER}]\naddress = "{peer}"\n'
        )

    def write(self, text: str) -> None:
        self.config.write_text(text)

    def add(self, text: str) -> None:
        self.write(f"{self.config.read_text()}{text}\n")

    def certify(self, *, days_ago: float = 0, run: str = RUN, folder: Path | None = None) -> Path:
        """Make certificates as of some days ago."""
        certs = self.certs if folder is None else folder
        init_run(certs, run, [OWN, PEER], now=dt.datetime.now(dt.UTC) - dt.timedelta(days=days_ago))
        return certs

    def arguments(self) -> list[str]:
        return ["doctor", "--config", str(self.config), "--region", OWN, "--json"]

    def examine(self, *command: str) -> Sheet:
        """Run the doctor, with a training command or without."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = main([*self.arguments(), *(("--", *command) if command else ())])
        return Sheet(code, out.getvalue())

    async def examine_beside(self) -> Sheet:
        """The same while this loop goes on."""
        return await asyncio.to_thread(self.examine)

    def examine_apart(self, *before: str) -> Sheet:
        """The same in a process of its own, which these words begin."""
        command = [*before, *COMMAND, *self.arguments()]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        assert process.stdout, (process.returncode, process.stderr)
        return Sheet(process.returncode, process.stdout)

    @contextlib.asynccontextmanager
    async def peer(
        self, *, certs: Path | None = None, region: str = PEER, run: str = RUN, **changes: Any
    ) -> AsyncIterator[GrpcTransport]:
        """A real transport where `PEER` is expected."""
        config = load_config(self.config)
        with ThreadPoolExecutor(2) as executor:
            options: dict[str, Any] = {
                "region": region,
                "run_id": run,
                "founding_digest": config.founding_digest(),
                "settings_digest": config.settings_digest(),
                "manifest_digest": "manifest",
                "settings": tuple(f"{key}={value}" for key, value in config.shared_settings().items()),
                "identity": load_identity((certs or self.certs) / region),
                "listen": ("127.0.0.1", self.peer_port),
                "peers": {OWN: None} if region != OWN else {PEER: None},
                "handler": Recorder(),
                "executor": executor,
                "times": FAST,
                **changes,
            }
            transport = GrpcTransport(**options)
            await transport.start()
            try:
                yield transport
            finally:
                await transport.stop()


class Sheet:
    """The findings of a doctor."""

    def __init__(self, exit_code: int, out: str) -> None:
        self.exit_code = exit_code
        self.document: dict[str, Any] = json.loads(out)
        self.checks: list[dict[str, str]] = self.document["checks"]

    def of(self, check: str) -> Iterator[dict[str, str]]:
        return (entry for entry in self.checks if entry["check"] == check)

    def one(self, check: str) -> dict[str, str]:
        """The worst of a check."""
        order = ["failed", "warning", "unknown", "ok"]
        return min(self.of(check), key=lambda entry: order.index(entry["mark"]))

    def failed(self) -> set[str]:
        return {entry["check"] for entry in self.checks if entry["mark"] == "failed"}
