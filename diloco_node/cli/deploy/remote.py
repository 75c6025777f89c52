"""One region's machine, over the system's ssh and scp: what is copied there, and what is run."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diloco_node.cli.deploy.hosts import SshHost
from diloco_node.errors import ConfigError, DilocoError, PeersUnreachable

CONNECT_S: Final = 15
CALL_MAX_S: Final = 360
"""Of one ssh or scp. The unit's TimeoutStartSec is less: systemd's own words are better than ours."""
SSH_FAILED: Final = 255
NOT_FOUND: Final = 127
NO_MANAGER: Final = 41
CERTIFICATE_FILES: Final = ("ca.pem", "node.pem", "node.key")

UNIT: Final = """\
# Written by `diloco-node deploy ssh`.
[Unit]
Description=diloco-node, run {run_id}, region {region}
StartLimitIntervalSec=10
StartLimitBurst=5

[Service]
Type=notify
WorkingDirectory={folder}
ExecStart={start}
ExecReload=/bin/kill -HUP $MAINPID
KillMode=mixed
TimeoutStartSec=5min
TimeoutStopSec=40
WatchdogSec=2min
Restart=on-failure
RestartSec=100ms
RestartPreventExitStatus=2 4 6 7
OOMPolicy=continue
UMask=0077

[Install]
WantedBy=default.target
"""
"""Of the user's own service manager: no root is needed. deploy/systemd has the one for the system's."""


@dataclass(frozen=True, slots=True)
class Shipment:
    """What one region gets.

    Attributes:
        config_file: run.toml. identity_dir: the folder with CERTIFICATE_FILES of this region.
    """

    region: str
    run_id: str
    host: SshHost
    config_file: Path
    identity_dir: Path

    @property
    def folder(self) -> str:
        """Where it goes; below the home of the user unless it begins with a slash."""
        return self.host.folder or f"diloco/{self.run_id}"

    @property
    def unit_name(self) -> str:
        """Of the service."""
        return f"diloco-node-{self.run_id}-{self.region}.service"

    def unit(self) -> str:
        """The unit's text; `%h` is the user's home. Every word is quoted for systemd."""
        program = self.host.program
        where = self.folder if self.folder.startswith("/") else f"%h/{self.folder}"
        if "/" in program and not program.startswith("/"):
            program = f"%h/{program}"
        words = [program, "start", "--region", self.region, "--certs", "certs", "--state-dir", "state"]
        command = ["--", *(_quoted(word) for word in self.host.command)] if self.host.command else []
        # A name without a slash is looked for in systemd's own PATH, which has no ~/.local/bin: the shell knows it.
        shell = [] if "/" in program else ["/bin/sh", "-lc", '\'exec "$$0" "$$@"\'']
        return UNIT.format(
            run_id=self.run_id, region=self.region, folder=where, start=" ".join([*shell, *words, *command])
        )


class Remote:
    """Carries out the steps of a deployment on one machine.

    Args:
        ssh_config: as ssh's `-F`. is_dry: commands are told and not run. say: takes each command that is run.
    """

    def __init__(
        self, shipment: Shipment, ssh_config: Path | None, *, is_dry: bool, say: Callable[[str], None]
    ) -> None:
        self._shipment = shipment
        self._is_dry = is_dry
        self._say = say
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"]
        self._options = options + (["-F", str(ssh_config)] if ssh_config is not None else [])

    def check(self, version: str) -> None:
        """The machine answers, and has the same diloco-node and a service manager of its user.

        Raises:
            PeersUnreachable: ssh does not get there. ConfigError: something is missing there; says what to do.
        """
        host = self._shipment.host
        script = f"{self._program} --version && {{ {_MANAGER} || exit {NO_MANAGER}; }}"
        code, said = self._ssh(script, is_checked=False)
        if code == NOT_FOUND:
            raise self._wrong(f"has no {host.program}: install it there (pip install), or name its path as `program`")
        if code == NO_MANAGER:
            raise self._wrong(
                f"has no service manager for {host.user}: run `sudo loginctl enable-linger {host.user}` there (it "
                "needs systemd), or start the region there by hand: diloco-node start"
            )
        if code:
            raise self._wrong(f"can't run {host.program} --version: {_last_line(said)}")
        if not self._is_dry and version not in said.split():
            raise self._wrong(f"has {_last_line(said) or 'another version'}, this machine {version}: install the same")

    def copy(self) -> None:
        """run.toml, the region's certificate and key, and its unit. Raises DilocoError."""
        one, folder = self._shipment, shlex.quote(self._shipment.folder)
        identity = f"{folder}/certs/{one.region}"
        units = ".config/systemd/user"
        self._ssh(f"umask 077 && mkdir -p {identity} {units} && chmod 700 {folder}/certs {identity}")
        self._scp([one.config_file], f"{one.folder}/run.toml")
        self._scp([one.identity_dir / name for name in CERTIFICATE_FILES], f"{one.folder}/certs/{one.region}/")
        with tempfile.TemporaryDirectory() as place:
            unit = Path(place) / one.unit_name
            unit.write_text(one.unit())
            self._scp([unit], f"{units}/")
        self._ssh(f"chmod 600 {identity}/node.key")

    def start(self, *, is_restarted: bool) -> None:
        """Start the service; one that runs goes on as it is, unless it is to be restarted. Raises DilocoError."""
        unit, verb = shlex.quote(self._shipment.unit_name), "restart" if is_restarted else "start"
        self._ssh(f"{_ENV}; systemctl --user daemon-reload && systemctl --user enable --quiet {unit}")
        code, said = self._ssh(f"{_ENV}; systemctl --user {verb} {unit}", is_checked=False)
        if code:
            log = f"{self._shipment.folder}/state/{self._shipment.region}/logs"
            raise self._wrong(
                f"the service did not start ({_last_line(said)}). There: journalctl --user -u {unit}, and {log}"
            )

    def state(self) -> str:
        """What its service manager says, and the row that `diloco-node status` shows. Raises DilocoError."""
        unit, folder = shlex.quote(self._shipment.unit_name), shlex.quote(self._shipment.folder)
        _, said = self._ssh(
            f"{_ENV}; systemctl --user show --property=ActiveState,SubState,StatusText {unit}; "
            f"cd {folder} && {self._program_from_folder} status state/{self._shipment.region} || true"
        )
        return said

    @property
    def _program(self) -> str:
        """Found as a login shell finds it."""
        return f'sh -lc \'exec "$0" "$@"\' {shlex.quote(self._shipment.host.program)}'

    @property
    def _program_from_folder(self) -> str:
        program = self._shipment.host.program
        is_below_home = "/" in program and not program.startswith("/")
        return f'"$HOME"/{shlex.quote(program)}' if is_below_home else self._program

    def _ssh(self, script: str, *, is_checked: bool = True) -> tuple[int, str]:
        host = self._shipment.host
        words = ["ssh", *self._options, "-p", str(host.port), f"{host.user}@{host.address.strip('[]')}", script]
        return self._run(words, is_checked=is_checked)

    def _scp(self, files: Sequence[Path], target: str) -> None:
        host = self._shipment.host
        address = f"[{host.address.strip('[]')}]" if ":" in host.address else host.address
        names = [str(file) for file in files]
        words = ["scp", "-q", "-p", *self._options, "-P", str(host.port), *names, f"{host.user}@{address}:{target}"]
        self._run(words, is_checked=True)

    def _run(self, words: list[str], *, is_checked: bool) -> tuple[int, str]:
        self._say(shlex.join(words))
        if self._is_dry:
            return 0, ""
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=CALL_MAX_S,
                check=False,
            )  # fmt: skip
        except FileNotFoundError:
            raise ConfigError(f"there is no {words[0]} on this machine: install openssh-client") from None
        except subprocess.TimeoutExpired:
            raise self._wrong(f"did not end `{shlex.join(words[-1:])}` within {CALL_MAX_S} s: look there") from None
        said = (done.stdout + done.stderr).strip()
        if done.returncode == SSH_FAILED:
            raise self._unreachable(_last_line(said))
        if done.returncode and is_checked:
            raise self._wrong(f"{words[0]} ended with {done.returncode}: {_last_line(said)}")
        return done.returncode, said

    def _unreachable(self, why: str) -> PeersUnreachable:
        host = self._shipment.host
        return PeersUnreachable(
            f"{self._shipment.region}: {host.user}@{host.address} is not reached: {why}. Make "
            f"`ssh -p {host.port} {host.user}@{host.address}` work without a password (ssh-copy-id), then try again"
        )

    def _wrong(self, what: str) -> DilocoError:
        return ConfigError(f"{self._shipment.region}: {self._shipment.host.address} {what}")


_ENV: Final = 'export XDG_RUNTIME_DIR="${XDG_RUNTIME_DIR:-/run/user/$(id -u)}"'
_MANAGER: Final = f"{_ENV}; systemctl --user show --property=Version > /dev/null 2>&1"


def _quoted(word: str) -> str:
    """For a line of a unit: systemd reads specifiers, variables and backslashes in a word."""
    plain = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$").replace("\n", "\\n")
    return f'"{plain}"'


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
