"""What can be set, its default and its limits. The keys of run.toml are the names of these fields."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from diloco_node.config.budget_settings import BudgetSection, Ceiling
from diloco_node.config.units import Duration, parse_duration
from diloco_node.core.merge.fragments import FRAGMENTS_MAX
from diloco_node.core.types import CarryMode, Codec, MergeRule, RunSettings

NAME_PATTERN: Final = r"^[a-z0-9-]{1,63}$"
REGIONS_MAX: Final = 64
MODULES_MAX: Final = 100
"""Of `learner.preload`. Nobody writes down so many, and each costs the start of the region its import."""

FIXED_IN_A_RUN: Final = frozenset(
    f"rounds.{name}"
    for name in (
        "fragments",
        "merge",
        "codec_up",
        "codec_down",
        "error_feedback",
        "payload_versions",
        "checkpoint_versions",
        "summary_entries",
    )
)
"""Of what all regions must agree on: what a run keeps from its beginning, for it is in its files (D-093)."""

_RUN: Final = RunSettings()


def _whole(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError("it must be a whole number")
    return value


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("it must be a number")
    return value


def _paths(value: object) -> object:
    """A list, or (from the environment) paths with `:` between them; the one in `hf:NAME` is none of these."""
    return tuple(part for part in re.split(r"(?<!\bhf):", value) if part) if isinstance(value, str) else value


def _modules(value: object) -> object:
    """A list, or (from the environment and flags) names with `,` between them."""
    names = tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
    for name in names if isinstance(names, list | tuple) else ():
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{name!r} is not the name of a module, as one writes it after `import`")
    return names


def _host_port(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError('it must be "HOST:PORT", such as "10.0.0.1:7400"')
    host, _, port = value.rpartition(":")
    # It ends up in the arguments of ssh and in lines to copy: no option, and nothing that a shell reads.
    if not re.fullmatch(r"\w[\w.-]*|\[[0-9A-Fa-f:.]+(%\w[\w.-]*)?\]", host):
        raise ValueError('it must be "HOST:PORT", such as "10.0.0.1:7400" or "[fd00::1]:7400"')
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65_535:
        raise ValueError(f"port {port!r} is not from 1 to 65535")
    return value


def _admin_host(value: object) -> object:
    try:
        address = ipaddress.ip_address(value) if isinstance(value, str) else None
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address.is_multicast:
        # 0.0.0.0 would also open it to the network between regions.
        raise ValueError("it must be one address of this machine, as a number, and not all of them")
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Span = Annotated[Duration, NoDecode, PlainValidator(parse_duration)]
AdminHost = Annotated[str, BeforeValidator(_admin_host), Field(examples=["172.20.0.2"])]
TrackerName = Literal["tensorboard", "trackio", "wandb"]
HostPort = Annotated[str, BeforeValidator(_host_port)]


class Section(BaseModel):
    """A table of run.toml: unknown keys are refused, values don't change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """`[run]`: what the run is called, when it ends, where things lie.

    Attributes:
        id: in every certificate; regions of another run are refused.
        tokens, steps: end by merged tokens of all regions, or by the steps of the median learner; 0: no end.
        seed: of parameters, data order and election timeouts.
        state_dir: a region keeps everything in `state_dir/REGION`.
        certs_dir: as `certs init` made it; a region reads `certs_dir/REGION`.
        init: a safetensors file with the first parameters; none: the first leader's learner decides.
    """

    id: Annotated[str, Field(pattern=NAME_PATTERN, examples=["my-run"])]
    tokens: Annotated[Whole, Field(ge=0, le=1 << 62)] = _RUN.tokens_max
    steps: Annotated[Whole, Field(ge=0, le=1 << 40)] = _RUN.steps_max
    seed: Annotated[Whole, Field(ge=0, lt=1 << 31)] = 0
    state_dir: Path = Path("state")
    certs_dir: Path = Path("certs")
    init: Path | None = None


class ModelSection(Section):
    """`[model]`: the built-in trainer. Of no effect when `start` is given a command of its own."""

    hf: Annotated[str | None, Field(min_length=1, examples=["model"])] = None
    hf_args: Annotated[dict[str, Any], Field(examples=[{"learning_rate": 1e-4}])] = {}
    layers: Annotated[Whole, Field(ge=1, le=128)] = 2
    dim: Annotated[Whole, Field(ge=8, le=16_384)] = 64
    heads: Annotated[Whole, Field(ge=1, le=256)] = 4
    context: Annotated[Whole, Field(ge=2, le=65_536)] = 64
    batch: Annotated[Whole, Field(ge=1, le=65_536)] = 8
    lr: Annotated[Number, Field(gt=0, lt=10)] = 6e-3
    schedule_steps: Annotated[Whole, Field(ge=0, le=1 << 40)] = 0
    eval_every: Annotated[Whole, Field(ge=0, le=1 << 40)] = 200
    eval_windows: Annotated[Whole, Field(ge=1, le=65_536)] = 64
    threads: Annotated[Whole, Field(ge=1, le=1024)] = 1
    step_time_min: Span = Duration(0)
    ranks: Annotated[Whole, Field(ge=1, le=1024)] = 1
    shard: Literal["none", "ddp", "fsdp"] = "none"


class RoundsSection(Section):
    """`[rounds]`: how regions merge; the same on all of them. See `core.types.RunSettings` for each.

    Attributes:
        outer_lr, outer_momentum: none: chosen by the run's length in outer cycles (`config.resolve.default_outer`).
    """

    fragments: Annotated[Whole, Field(ge=1, le=FRAGMENTS_MAX)] = _RUN.fragments
    sync_every: Annotated[Whole, Field(ge=1, le=100_000)] = _RUN.sync_every
    overlap_steps: Annotated[Whole, Field(ge=0, le=100_000)] = _RUN.overlap_steps
    quorum_min: Annotated[Whole, Field(ge=0, le=REGIONS_MAX)] = _RUN.quorum_min
    grace_gamma: Annotated[Number, Field(ge=0, le=1)] = _RUN.grace_gamma
    rounds_in_flight_max: Annotated[Whole, Field(ge=1, le=64)] = _RUN.rounds_in_flight_max
    outer_lr: Annotated[Number | None, Field(gt=0, le=10, examples=[_RUN.outer_lr])] = None
    outer_momentum: Annotated[Number | None, Field(ge=0, lt=1, examples=[_RUN.outer_momentum])] = None
    merge: MergeRule = _RUN.merge
    codec_up: Codec = _RUN.codec_up
    codec_down: Codec = _RUN.codec_down
    carry: CarryMode = _RUN.carry
    carry_steps_max: Annotated[Whole, Field(ge=0, le=1 << 40)] = _RUN.carry_steps_max
    weight_cap: Annotated[Number, Field(ge=1, le=1_000)] = _RUN.weight_cap
    error_feedback: bool = _RUN.error_feedback
    heartbeat: Span = Duration(_RUN.heartbeat_ns)
    election_timeout: Span = Duration(_RUN.election_timeout_ns)
    ballot_deadline_min: Span = Duration(_RUN.ballot_deadline_min_ns)
    payload_versions: Annotated[Whole, Field(ge=1, le=10_000)] = _RUN.payload_versions
    checkpoint_versions: Annotated[Whole, Field(ge=1, le=10_000)] = _RUN.checkpoint_versions
    summary_entries: Annotated[Whole, Field(ge=64, le=1 << 20)] = _RUN.summary_entries


class DataSection(Section):
    """`[data]`: text for the built-in trainer, rows for the recipe of `[model] hf`."""

    paths: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_paths), Field(max_length=10_000)] = ()
    text_field: str = "text"
    streaming: bool = False


class LearnerSection(Section):
    """`[learner]`: the process that trains; may differ between regions.

    Attributes:
        hang: it is killed and started again when it makes no step for so long, and for ten times as long as its
            longest pause of late; 0s: never.
        on_spike: what follows when loss or gradient norm are far outside of their recent range, several times in a
            row: `warn`, or `rollback` to the merged parameters.
        preload: modules that a process of the region imports once, from which each start of the learner is forked;
            an empty list: the learner always starts afresh. None: what the built-in trainer imports, where it is the
            learner; a command of your own starts afresh.
    """

    hang: Span = Duration(300 * 1_000_000_000)
    on_spike: Literal["warn", "rollback"] = "warn"
    preload: Annotated[
        tuple[str, ...] | None,
        NoDecode,
        BeforeValidator(_modules),
        Field(max_length=MODULES_MAX, examples=[("torch", "transformers")]),
    ] = None


class LogSection(Section):
    """`[log]`: the daemon's log in `logs/`; may differ between regions.

    Attributes:
        level: lines from this one on; `log-level` changes it while the region runs. format: one fact a line, as
            key=value (`logfmt`) or as an object (`json`).
    """

    level: Literal["info", "warning", "error"] = "info"
    format: Literal["logfmt", "json"] = "logfmt"


class HistorySection(Section):
    """`[history]`: how the run went, in `history.jsonl` of each region's folder; may differ between regions.

    Attributes:
        every: between two rows. The file keeps the whole run, so rows of a long one are further apart.
        to: what gets the rows beside the file; each needs the extra of its name.
    """

    every: Annotated[Span, Field(examples=["10s"])] = Duration(2_000_000_000)
    to: Annotated[
        tuple[TrackerName, ...], NoDecode, BeforeValidator(_modules), Field(max_length=3, examples=[("tensorboard",)])
    ] = ()


class RegionSection(Section):
    """`[regions.NAME]`: one region.

    Attributes:
        address: "HOST:PORT" at which the others dial it; none: it can't be dialled, and dials them.
        listen: "HOST:PORT" to bind; none: all interfaces (loopback if the address is), at the address' port.
        admin_port: dashboard, metrics and status, on loopback; 0: a free one, written to `admin.port` in its folder.
        admin_host: one more address of this machine to bind for them, for containers: a port published on the host's
            loopback arrives there. Whoever reaches it can read the status, so give it a network that peers are not on.
        measure_port: where `measure serve` of this region listens, and where others dial it, so that it can run beside
            the daemon; 0: at the port of the region. No port that the region has for something else.
        egress, ingress: this region's own ceilings, instead of those of `[budget]`.
        payload_archive: it keeps every payload that it gets, the first parameters and the whole ledger, for `replay`.
            The folder grows without end.
    """

    address: HostPort | None = None
    listen: HostPort | None = None
    admin_port: Annotated[Whole, Field(ge=0, le=65_535)] = 0
    admin_host: AdminHost = "127.0.0.1"
    measure_port: Annotated[Whole, Field(ge=0, le=65_535)] = 0
    egress: Annotated[Ceiling | None, Field(examples=["2Gbit/s"])] = None
    ingress: Annotated[Ceiling | None, Field(examples=["2Gbit/s"])] = None
    payload_archive: bool = False


class Tree(BaseSettings):
    """All of run.toml. Values are handed in already merged (`sources`), so that their origins are known."""

    model_config = SettingsConfigDict(
        env_prefix="DILOCO_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=False,
    )

    run: RunSection
    model: ModelSection = ModelSection()
    rounds: RoundsSection = RoundsSection()
    data: DataSection = DataSection()
    learner: LearnerSection = LearnerSection()
    budget: BudgetSection = BudgetSection()
    log: LogSection = LogSection()
    history: HistorySection = HistorySection()
    regions: dict[str, RegionSection]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is handed in."""
        return (init_settings,)
