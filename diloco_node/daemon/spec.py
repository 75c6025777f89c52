"""The specification of a daemon process: resolved settings, as a JSON file that a restart reads again."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_node.atomic_file import replace_file
from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.core.types import CarryMode, Codec, MergeRule, RunSettings
from diloco_node.errors import ConfigError

if TYPE_CHECKING:  # the supervisor reads this, and has no use for a log of structlog's
    from diloco_node.daemon.logs import LogFormat


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """Everything a daemon needs to know.

    Attributes:
        run_id: the run's name, in every certificate.
        regions: that found the run, sorted; without this one, if it was added later: those that it knows.
        listen_host, listen_port: where the port between regions is bound.
        peers: address "host:port" of each other region, None where it can't be dialled.
        address: of this region, where the others dial it; None: it dials them, at once instead of being dialled.
        admin_port: on loopback; 0 picks a free one (it is in state_dir/admin.port). admin_host: another address for it.
        config_file: run.toml, read again for the budget at SIGHUP; None: there is none.
        settings_digest: hex; must be equal on all regions. founding_digest: see `NodeConfig.founding_digest`.
        shared_settings: what the digests are of, as run.toml has it: "rounds.sync_every=24" each.
        joiner_settings: that a region which joins the run takes over, in the same way.
        init: a safetensors file with Theta_0, or None: the first leader's learner decides.
        seed: of everything random in the daemon (election timeouts, back-off).
        settings_shown: (key, value, where it was set) of all settings, for people.
        payload_archive: the folder keeps what `replay` needs. history_every_s: between two rows of the run history.
        is_serving: the run is finished here; the region is there for others until all have its end.
        joined: changes of the members when this region joined the run; 0: it founded it.
    """

    region: str
    run_id: str
    regions: tuple[str, ...]
    listen_host: str
    listen_port: int
    peers: dict[str, str | None]
    address: str | None
    state_dir: Path
    identity_dir: Path
    admin_port: int
    learner_socket: Path
    supervisor_socket: Path
    settings: RunSettings
    settings_digest: str
    founding_digest: str = ""
    init: str | None = None
    seed: int = 0
    admin_host: str = "127.0.0.1"
    budget: BudgetPlan = BudgetPlan()  # noqa: RUF009 - frozen
    config_file: Path | None = None
    payload_archive: bool = False
    settings_shown: tuple[tuple[str, ...], ...] = ()
    shared_settings: tuple[str, ...] = ()
    joiner_settings: tuple[str, ...] = ()
    log_level: str = "info"
    log_format: LogFormat = "logfmt"
    history_every_s: float = 2.0
    is_serving: bool = False
    joined: int = 0

    def save(self, path: Path) -> None:
        """Write as JSON; under its name only when whole."""
        document = dataclasses.asdict(self)
        replace_file(path, (json.dumps(document, indent=2, default=str) + "\n").encode(), is_durable=False)

    @classmethod
    def load(cls, path: Path) -> NodeSpec:
        """Read what `save` wrote. Raises ConfigError: the file is missing or not ours."""
        try:
            document: dict[str, Any] = json.loads(path.read_text())
            settings = document["settings"]
            settings |= {
                "merge": MergeRule(settings["merge"]),
                "codec_up": Codec(settings["codec_up"]),
                "codec_down": Codec(settings["codec_down"]),
                "carry": CarryMode(settings["carry"]),
            }
            paths = ("state_dir", "identity_dir", "learner_socket", "supervisor_socket")
            document |= {name: Path(document[name]) for name in paths}
            document |= {
                "settings": RunSettings(**settings),
                "regions": tuple(document["regions"]),
                "settings_shown": tuple(tuple(row) for row in document.get("settings_shown", ())),
                "shared_settings": tuple(document.get("shared_settings", ())),
                "joiner_settings": tuple(document.get("joiner_settings", ())),
                "budget": BudgetPlan.from_plain(document["budget"]),
                "config_file": None if document["config_file"] is None else Path(document["config_file"]),
            }
            return cls(**document)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is not a node specification ({error!r}); `diloco-node start` writes it and starts the daemon"
            ) from error
