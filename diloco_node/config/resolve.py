"""Put the sources together, check the whole, and say in one line what is wrong and what would work."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import ipaddress
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.config.budget_settings import LimitsSection, WindowSection
from diloco_node.config.schema import REGIONS_MAX, ModelSection, RegionSection, RoundsSection, RunSection, Tree
from diloco_node.config.setting_texts import toml_text
from diloco_node.config.sources import MODEL_KEY, Flag, Key, Sources, folder_or_name, put, read_environment, read_file
from diloco_node.config.urls import host_and_port
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.shapes import REGION_NAMES, is_region_name
from diloco_node.core.types import RunSettings
from diloco_node.errors import ConfigError

DEFAULT_NAME: Final = "run.toml"
_SHOWN_CHARACTERS_MAX: Final = 80

# Tables below tables: [budget.per_peer.NAME] and [[budget.schedule]].
_BUDGET_TABLES: Final[dict[Key, type[BaseModel]]] = {
    ("budget", "per_peer"): LimitsSection,
    ("budget", "schedule"): WindowSection,
}


def default_outer(cycles: int) -> tuple[float, float]:
    """Outer learning rate and momentum for a run of so many outer cycles (steps / H).

    Momentum averages over 1 / (1 - mu) cycles and needs many of them to pay; what a constant gradient ends up with,
    lr / (1 - mu), was best near 1 to 1.5. Held-out loss with RDA, H = 16, M = 4 (one seed):

    ====== ======= ========= ========= ========= ========= =========
    cycles 1.0 / 0 0.7 / 0.3 0.5 / 0.6 0.4 / 0.7 0.4 / 0.8 0.3 / 0.9
    ====== ======= ========= ========= ========= ========= =========
    20     2.167   2.167     2.194
    40     1.900   1.889     1.911
    75                                 1.705     1.721     1.768
    250                      1.488     1.494     1.497
    ====== ======= ========= ========= ========= ========= =========

    Args:
        cycles: at least 0; 0 means that the length of the run is not known.
    """
    return (0.7, 0.3) if 0 < cycles < 60 else (0.5, 0.6)


def is_joiner_setting(key: str) -> bool:
    """Whether a region that joins takes over the setting with this dotted key from a member of the run."""
    section, _, name = key.partition(".")
    fields: dict[str, type[BaseModel]] = {"run": RunSection, "model": ModelSection, "rounds": RoundsSection}
    is_own = key in {"run.state_dir", "run.certs_dir", "run.init", "model.ranks", "model.shard", "model.threads"}
    return section in fields and name in fields[section].model_fields and not is_own


class NodeConfig(Tree):
    """Everything that is set, checked as a whole; regions are sorted by name. path: run.toml. origins: where each value
    that is not a default came from: "run.toml:7", "DILOCO_RUN__STEPS", "--steps"."""

    origins: Mapping[Key, str]
    path: Path

    def origin(self, key: str) -> str:
        """Where the value of a dotted key came from; "default" if nobody set it."""
        path = tuple(key.split("."))
        below = (origin for key, origin in self.origins.items() if key[: len(path)] == path)
        return self.origins.get(path) or next(below, "default")

    def state_dir(self, region: str) -> Path:
        """The region's own folder."""
        return self.run.state_dir / region

    def identity_dir(self, region: str) -> Path:
        """The folder with the region's certificate and key."""
        return self.run.certs_dir / region

    def check_region(self, region: str) -> None:
        """Refuse a region that is not in run.toml, with ConfigError."""
        if region not in self.regions:
            raise ConfigError(
                f"--region {region!r} is not in [regions]{did_you_mean(region, self.regions)}; "
                f"there are {', '.join(self.regions)}"
            )

    def listen(self, region: str) -> tuple[str, int]:
        """Host and port to bind. Port 0 (any) for a region that nobody dials."""
        section = self.regions[region]
        if section.listen is not None:
            return host_and_port(section.listen)
        if section.address is None:
            return "127.0.0.1", 0
        host, port = host_and_port(section.address)
        is_loopback = host in {"localhost", "::1"} or host.startswith("127.")
        return (host if is_loopback else "::" if ":" in host else "0.0.0.0"), port

    def run_settings(self) -> RunSettings:
        """The settings that all regions must agree on."""
        rounds = {name: getattr(self.rounds, name) for name in RoundsSection.model_fields}
        cycles = self.run.steps // self.rounds.sync_every
        for name, value in zip(("outer_lr", "outer_momentum"), default_outer(cycles), strict=True):
            rounds[name] = value if rounds[name] is None else rounds[name]
        spans = {f"{name}_ns": rounds.pop(name).ns for name in ("heartbeat", "election_timeout", "ballot_deadline_min")}
        return RunSettings(tokens_max=self.run.tokens, steps_max=self.run.steps, **rounds, **spans)

    def budget_plan(self, region: str) -> BudgetPlan:
        """The bandwidth budget of one region; it may differ between regions, and is no part of `settings_digest`."""
        section = self.regions[region]
        return self.budget.plan(region, LimitsSection(egress=section.egress, ingress=section.ingress).rates())

    def settings_digest(self) -> str:
        """SHA-256 (hex) of `run_settings` without those of `founding_digest`: equal in all regions, always."""
        settings = self.run_settings()
        in_ledger = dataclasses.asdict(SettingsBody.of(settings))
        values = dataclasses.asdict(settings).items()
        return _digest({name: value for name, value in values if name not in in_ledger})

    def founding_digest(self) -> str:
        """SHA-256 (hex) of the settings that the ledger holds from the beginning of the run on."""
        return _digest(dataclasses.asdict(SettingsBody.of(self.run_settings())))

    def shared_settings(self) -> dict[str, str]:
        """The settings in both digests: by key in run.toml, each value as it would be written there."""
        return {
            key: value
            for key, value, _ in self.rows()
            if key.startswith("rounds.") or key in {"run.steps", "run.tokens"}
        }

    def joiner_settings(self) -> dict[str, str]:
        """The settings that a region which joins the run takes over, as `shared_settings`; without defaults."""
        return {key: value for key, value, origin in self.rows() if origin != "default" and is_joiner_setting(key)}

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """(dotted key, value as text, origin) of every setting; defaults that the program chooses are filled in."""
        settings = self.run_settings()
        values = {"outer_lr": settings.outer_lr, "outer_momentum": settings.outer_momentum}
        for name in ("run", "model", "rounds", "data", "learner", "log", "history"):
            section = self.rounds.model_copy(update=values) if name == "rounds" else getattr(self, name)
            yield from self._section_rows(name, section)
        for key, value in self.budget.rows():
            yield f"budget.{key}", toml_text(value), self.origin(f"budget.{key}")
        for name, region in self.regions.items():
            yield from self._section_rows(f"regions.{name}", region)

    def _section_rows(self, prefix: str, section: BaseModel) -> Iterator[tuple[str, str, str]]:
        for name in type(section).model_fields:
            key = f"{prefix}.{name}"
            yield key, toml_text(getattr(section, name)), self.origin(key)


def _digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def load_config(path: Path | None, flags: Sequence[Flag] = ()) -> NodeConfig:
    """Flags beat environment, environment beats file, file beats defaults. path: None: run.toml in the current folder.

    Raises ConfigError: naming the setting, its origin, the bad value, and what would work.
    """
    path = path if path is not None else Path(DEFAULT_NAME)
    sources = Sources()
    # Like all paths of the file, these defaults are taken from its folder, not from where the command was typed.
    put(sources.values, ("run", "state_dir"), str(path.parent / "state"))
    put(sources.values, ("run", "certs_dir"), str(path.parent / "certs"))
    sources.add(*read_file(path))
    sources.add(*read_environment())
    for flag in flags:
        key = tuple(flag.key.split("."))
        put(sources.values, key, folder_or_name(Path(), flag.value) if key == MODEL_KEY else flag.value)
        sources.origins[key] = flag.flag
    _check_names(sources)
    try:
        regions = dict(sorted(sources.values["regions"].items()))
        config = NodeConfig(**sources.values | {"regions": regions}, origins=sources.origins, path=path)
    except ValidationError as error:
        raise ConfigError(explain(error, sources)) from None
    _check_whole(config)
    return config


def _check_names(sources: Sources) -> None:
    """Unknown sections and bad names of regions, before pydantic would word them."""
    for section in sources.values:
        if section not in Tree.model_fields:
            origin = sources.origin((section,))
            raise ConfigError(
                f"[{section}] ({origin}) is no section of run.toml{did_you_mean(section, Tree.model_fields)}; "
                f"sections are {', '.join(Tree.model_fields)}"
            )
    regions = sources.values.get("regions")
    if not isinstance(regions, dict) or not regions:
        raise ConfigError('no regions: add [regions.us-east] with address = "HOST:PORT", and one table for each region')
    for name in regions:
        if not is_region_name(name):
            origin = sources.origin(("regions", name))
            raise ConfigError(f"[regions.{name}] ({origin}): a region's name is {REGION_NAMES}, as us-east")


def explain(error: ValidationError, sources: Sources) -> str:
    """Say in one line which value is wrong, and a value that works."""
    first, *more_errors = error.errors(include_url=False)
    also = ", ".join(".".join(_key_of(detail)) for detail in more_errors[:5])
    more = f" (also wrong: {also})" if also else ""
    return _explain_one(first, sources) + more


def _key_of(detail: ErrorDetails) -> Key:
    return tuple(str(name) for name in detail["loc"])


def _explain_one(detail: ErrorDetails, sources: Sources) -> str:
    key = _key_of(detail)
    origin = sources.origin(key)
    if detail["type"] == "extra_forbidden":
        siblings = _fields_at(key[:-1])
        hint = did_you_mean(key[-1], siblings) or f"; [{'.'.join(key[:-1])}] has {', '.join(siblings)}"
        return f"{'.'.join(key)} ({origin}) is not a setting{hint}"
    depth = 3 if key[:2] in _BUDGET_TABLES else 2 if key[:1] == ("regions",) else 1
    fields = _fields_at(key[:depth])
    field = next((fields[name] for name in key[1:] if name in fields), None)
    if detail["type"] == "missing":
        return f"{'.'.join(key)} is not set: add {key[-1]} = {_example(field)} under [{'.'.join(key[:-1])}] in run.toml"
    value = toml_text(detail["input"])[:_SHOWN_CHARACTERS_MAX]
    if detail["type"] in {"model_type", "dict_type"}:
        return f"{'.'.join(key)} is {value} ({origin}): it must be a table, [{'.'.join(key)}]"
    reason = re.sub(r"^(Value error, |Assertion failed, )", "", detail["msg"])
    reason = re.sub(r"^Input should be a valid (\w+)(, .*)?$", r"it must be of type \1", reason)
    reason = re.sub(r"^(Input|String|Tuple|Value) should ", "it must ", reason)
    return f"{'.'.join(key)} is {value} ({origin}): {reason}; for example {key[-1]} = {_example(field)}"


def _fields_at(key: Key) -> dict[str, FieldInfo]:
    if key[:1] == ("regions",):
        return RegionSection.model_fields
    if key[:2] in _BUDGET_TABLES and len(key) > 2:
        return _BUDGET_TABLES[key[:2]].model_fields
    section = Tree.model_fields[key[0]].annotation if key and key[0] in Tree.model_fields else Tree
    return section.model_fields if isinstance(section, type) and issubclass(section, BaseModel) else {}


def _example(field: FieldInfo | None) -> str:
    """A value that works: the example of a setting without default, else its default."""
    if field is None:
        return '"..."'
    if field.examples:
        return toml_text(field.examples[0])
    return '"10.0.0.1:7400"' if field.default in (None, PydanticUndefined) else toml_text(field.default)


def did_you_mean(name: str, choices: Mapping[str, object]) -> str:
    """Return the question for the closest of some names; empty if none is close."""
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else ""


def _check_whole(config: NodeConfig) -> None:
    rounds, model, regions = config.rounds, config.model, config.regions
    if len(regions) > REGIONS_MAX:
        raise ConfigError(f"there are {len(regions)} regions; at most {REGIONS_MAX} are supported")
    _check_addresses(config)
    _check_ports(config)
    _check_budget(config)
    is_founding = not any(region.joined for region in regions.values())  # else it is the ledger's, and does no harm
    if is_founding and rounds.quorum_min > len(regions):
        _refuse(config, "rounds.quorum_min", f"there are {len(regions)} regions; 0 means a majority of those alive")
    if rounds.overlap_steps >= rounds.sync_every:
        _refuse(config, "rounds.overlap_steps", f"it must be less than rounds.sync_every, {rounds.sync_every}")
    if not 0 < rounds.heartbeat.ns <= rounds.election_timeout.ns // 3:
        _refuse(
            config,
            "rounds.heartbeat",
            f"it must be positive and at most a third of rounds.election_timeout, {rounds.election_timeout}",
        )
    if rounds.ballot_deadline_min.ns < rounds.heartbeat.ns:
        _refuse(config, "rounds.ballot_deadline_min", f"it must be at least rounds.heartbeat, {rounds.heartbeat}")
    if model.hf is None and model.hf_args:
        _refuse(config, "model.hf_args", "it is of no use without model.hf")
    if model.hf is None and model.dim % (2 * model.heads):
        fits = 2 * model.heads * max(1, round(model.dim / (2 * model.heads)))
        _refuse(config, "model.dim", f"it must be a multiple of 2 x model.heads, {2 * model.heads}; for example {fits}")


def _check_budget(config: NodeConfig) -> None:
    for name in config.budget.per_peer:
        if name not in config.regions:
            raise ConfigError(
                f"[budget.per_peer.{name}] ({config.origin(f'budget.per_peer.{name}')}): {name} is not in [regions]"
                f"{did_you_mean(name, config.regions)}"
            )
    for section in config.budget.schedule:
        if section.start == section.end:
            origin = config.origin("budget.schedule")
            raise ConfigError(f"budget.schedule ({origin}): a window that ends when it starts holds at no time")


def _check_addresses(config: NodeConfig) -> None:
    hidden = [name for name, region in config.regions.items() if region.address is None]
    if len(hidden) > 1:
        raise ConfigError(
            f"regions {' and '.join(hidden[:2])} have no address, so neither can dial the other: "
            f'add address = "HOST:PORT" under [regions.{hidden[0]}]'
        )
    owners: dict[str, str] = {}
    for name, region in config.regions.items():
        if region.address is not None and region.address in owners:
            _refuse(config, f"regions.{name}.address", f"region {owners[region.address]} has the same address")
        owners[region.address or name] = name


def _check_ports(config: NodeConfig) -> None:
    """A port that a region needs twice: the second one to bind it would fail."""
    for name, section in config.regions.items():
        prefix = f"regions.{name}"
        host, port = config.listen(name)
        ports = [(f"{prefix}.{'address' if section.listen is None else 'listen'}", host, port)]
        ports += [
            (f"{prefix}.admin_port", admin_host, section.admin_port)
            for admin_host in dict.fromkeys(("127.0.0.1", section.admin_host))
        ]
        ports.append((f"{prefix}.measure_port", host, section.measure_port))
        for index, (key, host, port) in enumerate(ports):
            for other_key, other_host, other_port in ports[:index]:
                if port and port == other_port and key != other_key and _is_same_place(host, other_host):
                    origin = config.origin(other_key)
                    reason = f"{other_key} ({origin}) takes that port; choose another one, or 0 for a free one"
                    _refuse(config, key, reason)


def _is_same_place(host: str, other_host: str) -> bool:
    """Whether one port can't be had at both. Names but localhost are not looked up: this may be another machine."""
    hosts = {"127.0.0.1" if name == "localhost" else name for name in (host, other_host)}
    for name in hosts:
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(name).is_unspecified:  # all interfaces, of both families: gRPC takes either
                return True
    return len(hosts) == 1


def _refuse(config: NodeConfig, key: str, reason: str) -> None:
    value: Any = config
    *path, name = tuple(key.split("."))
    for key_part in path:
        value = value[key_part] if isinstance(value, Mapping) else getattr(value, key_part)
    raise ConfigError(f"{key} is {toml_text(getattr(value, name))} ({config.origin(key)}): {reason}")
