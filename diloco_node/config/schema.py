"""All settings, each with default, limits and words. The keys of run.toml are the names of these fields."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

from diloco_node.config.budget_settings import BudgetSection, Ceiling, ceiling
from diloco_node.config.field_types import (
    AdminHost,
    HostPort,
    Number,
    Section,
    Span,
    Whole,
    changes,
    modules_of,
    paths_of,
    setting,
)
from diloco_node.config.units import Duration
from diloco_node.core.merge.fragments import FRAGMENTS_MAX
from diloco_node.core.types import CarryMode, Codec, MergeRule, RunSettings

Count = Annotated[Whole, Field(ge=0, le=1 << 40)]
Port = Annotated[Whole, Field(ge=0, le=65_535)]

NAME_PATTERN: Final = r"^[a-z0-9-]{1,63}$"
REGIONS_MAX: Final = 64
MODULES_MAX: Final = 100
"""Most modules of `learner.preload`: each costs the start of the region its import."""

_RUN: Final = RunSettings()

constant, agreement = partial(setting, changes="fixed"), partial(setting, changes="all")
"""As `setting`: one that a run keeps from its beginning, and one that changes while all regions are stopped."""

ledger_setting = partial(setting, changes="set")
"""As `setting`: one that the ledger holds, and an operator changes in all regions at one entry of it."""


class RunSection(Section):
    """`[run]`: what the run is called, when it ends, where things lie."""

    id: str = constant(
        ...,
        "the run's name, in every certificate and in the ledger",
        "each new run",
        pattern=NAME_PATTERN,
        examples=["my-run"],
    )
    tokens: Whole = agreement(
        _RUN.tokens_max,
        "end of the run by merged tokens of all regions; 0: no end",
        "you plan by tokens",
        ge=0,
        le=1 << 62,
    )
    steps: Count = agreement(
        _RUN.steps_max, "end of the run by inner steps of the median learner; 0: no end", "you plan by steps"
    )
    seed: Whole = setting(
        0,
        "seed of parameters, data order and election timeouts",
        "you repeat a run with other luck",
        changes="same",
        ge=0,
        lt=1 << 31,
    )
    state_dir: Path = setting(
        Path("state"),
        "folder of all regions' state, one folder each",
        "the disk is elsewhere; a new run beside an old one",
    )
    certs_dir: Path = setting(Path("certs"), "folder that `certs init` made", "certificates lie elsewhere")
    init: str | None = setting(
        None,
        "the first parameters: a safetensors file, a model's folder or index, or an earlier run's version N: FOLDER@N, "
        "or URL@N of a copy",
        "you go on from a model; regions start with other seeds",
        changes="new run",
    )


class ModelSection(Section):
    """`[model]`: the built-in trainer, or with `hf` its recipe for a model of Hugging Face.

    It has no effect when `start` gets a command of its own. With `hf`, the recipe reads `hf_args`, `context`,
    `schedule_steps`, `eval_windows` and `ranks` alone.
    """

    hf: str | None = constant(
        None,
        "a causal language model of Hugging Face: its name, or its folder",
        "you train such a model",
        min_length=1,
        examples=["model"],
    )
    hf_args: dict[str, Any] = setting(
        {}, "`TrainingArguments` of that model's training, by name", "you set `hf`", examples=[{"learning_rate": 1e-4}]
    )
    layers: Whole = constant(2, "blocks of the transformer", "you choose a size", ge=1, le=128)
    dim: Whole = constant(64, "width; a multiple of 2 x `heads`", "you choose a size", ge=8, le=16_384)
    heads: Whole = constant(4, "attention heads", "you choose a size", ge=1, le=256)
    context: Whole = setting(
        64, "tokens in a sequence; bytes for the built-in model", "you choose a size", ge=2, le=65_536
    )
    batch: Whole = setting(
        8, "sequences in an inner step of each rank", "the device has room for more, or not enough", ge=1, le=65_536
    )
    lr: Number = setting(
        6e-3, "peak learning rate of the inner optimizer", "always, with the size of the model", gt=0, lt=10
    )
    schedule_steps: Count = setting(
        0, "length of the cosine schedule in steps of the median learner; 0: the run's", "the run has no end"
    )
    eval_every: Count = setting(
        200, "steps of the run between held-out losses; 0: only at the end", "evaluations take too long"
    )
    eval_windows: Whole = setting(64, "sequences of one held-out loss", "the loss is noisy", ge=1, le=65_536)
    threads: Whole = setting(1, "CPU threads of torch", "you train on a CPU", ge=1, le=1024)
    step_time_min: Span = setting(Duration(0), "least time of an inner step", "demos and tests")
    ranks: Whole = setting(
        1, "processes that `start` has torchrun start on this machine", "the machine has several devices", ge=1, le=1024
    )
    shard: Literal["none", "ddp", "fsdp"] = setting(
        "none", "whether each rank has a part of the model, or all of it", "with `ranks`"
    )


class RoundsSection(Section):
    """`[rounds]`: how regions merge; the same on all of them. See `core.types.RunSettings` for each."""

    fragments: Whole = constant(
        _RUN.fragments,
        "P: parts of the model, merged one after the other",
        "the model is small (fewer), or peaks of bandwidth are too high (more)",
        ge=1,
        le=FRAGMENTS_MAX,
    )
    sync_every: Whole = ledger_setting(
        _RUN.sync_every,
        "H: inner steps between two merges of one fragment",
        "`plan` says that it does not fit: larger",
        ge=1,
        le=100_000,
    )
    overlap_steps: Whole = ledger_setting(
        _RUN.overlap_steps,
        "tau: inner steps that a round may take; less than `sync_every`",
        "rounds take longer than so many steps",
        ge=0,
        le=100_000,
    )
    quorum_min: Whole = ledger_setting(
        _RUN.quorum_min,
        "learners that must be due before a round opens; 0: a majority of the live ones",
        "you want no merge below so many regions",
        ge=0,
        le=REGIONS_MAX,
    )
    grace_gamma: Number = ledger_setting(
        _RUN.grace_gamma,
        "part of a round's slack for which a round waits for learners that are not due",
        "slow regions are left out too often (higher), or rounds start too late (lower)",
        ge=0,
        le=1,
    )
    rounds_in_flight_max: Whole = ledger_setting(
        _RUN.rounds_in_flight_max,
        "rounds open at once, of different fragments",
        '`status` often says "rounds in flight"',
        ge=1,
        le=64,
    )
    outer_lr: Number | None = ledger_setting(
        None,
        "learning rate of the outer step; none: by the run's length in cycles of H steps",
        "you have tuned it. A run keeps the default that it began with",
        gt=0,
        le=10,
        examples=[_RUN.outer_lr],
    )
    outer_momentum: Number | None = ledger_setting(
        None,
        "Nesterov momentum of the outer step; none: by the run's length",
        "as `outer_lr`",
        ge=0,
        lt=1,
        examples=[_RUN.outer_momentum],
    )
    merge: MergeRule = constant(
        _RUN.merge,
        "`rda`: direction and length averaged apart; `avg`: weighted mean, as always for embeddings and head; "
        "`trimmed`: `rda` without the extremes of each value",
        "you compare with plain DiLoCo (`avg`), or do not trust each region (`trimmed`)",
    )
    codec_up: Codec = constant(_RUN.codec_up, "encoding of contributions", "links are fast and you want exact values")
    codec_down: Codec = constant(
        _RUN.codec_down, "encoding of merged fragments", "as `codec_up`; `int4` halves what regions send to each other"
    )
    carry: CarryMode = agreement(
        _RUN.carry,
        "`carry`: steps that a merge left out go into a later one; `overwrite`: they are thrown away, as in the paper",
        "you compare with the paper",
    )
    carry_steps_max: Count = ledger_setting(
        _RUN.carry_steps_max,
        "inner steps up to which carried work counts in full; beyond it counts less. 0: 4 H",
        "regions are often cut off for longer",
    )
    weight_cap: Number = ledger_setting(
        _RUN.weight_cap,
        "a region that was away weighs at most so many times the median of its round",
        "long outages move the model too much (lower)",
        ge=1,
        le=1_000,
    )
    weight_share_max: Number = ledger_setting(
        _RUN.weight_share_max,
        "largest part of a round's weight that one of three or more regions may have",
        "one region has most of the devices (higher)",
        gt=0,
        le=1,
    )
    tokens_ratio_max: Number = ledger_setting(
        _RUN.tokens_ratio_max,
        "tokens per step beyond so many times the median of the others count as that median, with an alert",
        "a region's batch is that much larger than the others' (higher)",
        ge=1,
        le=64,
    )
    heartbeat: Span = agreement(
        Duration(_RUN.heartbeat_ns),
        "time between two heartbeats of the leader; at most a third of `election_timeout`",
        "`election_timeout`",
    )
    election_timeout: Span = agreement(
        Duration(_RUN.election_timeout_ns),
        "silence of the leader after which another is elected; drawn from one to two of it",
        "machines stand still for seconds, or round trips are above 300 ms: higher",
    )
    ballot_deadline_min: Span = ledger_setting(
        Duration(_RUN.ballot_deadline_min_ns), "least time of an attempt at a round", "links stall for seconds: higher"
    )
    payload_versions: Whole = constant(
        _RUN.payload_versions,
        "merged payloads that a region keeps on disk beyond its last checkpoint",
        "seldom",
        ge=1,
        le=10_000,
    )
    checkpoint_versions: Whole = constant(
        _RUN.checkpoint_versions,
        "merges of a fragment between two of its states on disk",
        "the disk is slow: higher",
        ge=1,
        le=10_000,
    )
    summary_entries: Whole = constant(
        _RUN.summary_entries, "ledger entries between two sums, and kept behind the last", "seldom", ge=64, le=1 << 20
    )


FIXED_IN_A_RUN: Final = frozenset(
    f"rounds.{name}" for name, field in RoundsSection.model_fields.items() if changes(field) == "fixed"
)
"""Settings of `[rounds]` that a run keeps from its beginning, for they are in its files (D-093)."""


class DataSection(Section):
    """`[data]`: text for the built-in trainer, rows for the recipe of `[model] hf`."""

    paths: Annotated[tuple[str, ...], NoDecode, BeforeValidator(paths_of)] = setting(
        (),
        "files or folders of text, with `hf` JSONL, Parquet and `hf:NAME` too; none: Python's own sources",
        "always",
        max_length=10_000,
    )
    text_field: str = setting("text", "field of a row that holds its text", "rows have another name for it")
    streaming: bool = setting(
        False, "rows are tokenised as they are trained, and not kept", "the corpus is larger than the disk"
    )


class LearnerSection(Section):
    """`[learner]`: the process that trains; may differ between regions."""

    hang: Span = setting(
        Duration(300 * 1_000_000_000),
        "a learner without a step for so long, and for ten times its longest pause, is restarted; 0s: never",
        "steps or evaluations take minutes",
    )
    stop_grace: Span = setting(
        Duration(25 * 1_000_000_000),
        "from SIGTERM to SIGKILL of the region's processes; the learner has four fifths of it",
        "steps are long, or the notice of a spot machine is shorter than 30 s",
    )
    on_spike: Literal["warn", "rollback"] = setting(
        "warn", "reaction when the loss leaves its range several times in a row", "runs are long and unattended"
    )
    encode: Literal["host", "device"] = setting(
        "host",
        "what encodes int4 and int8 contributions of a model on a GPU, to the same bytes",
        "a core that encodes holds up training: the device does it, with more memory",
    )
    preload: Annotated[tuple[str, ...] | None, NoDecode, BeforeValidator(modules_of)] = setting(
        None,
        "modules imported once, from which restarted learners are forked",
        "restarts must be fast",
        max_length=MODULES_MAX,
        examples=[("torch", "transformers")],
    )


class LogSection(Section):
    """`[log]`: the daemon's log in `logs/`; may differ between regions."""

    level: Literal["info", "warning", "error"] = setting("info", "least level of a line", "logs are too long")
    format: Literal["logfmt", "json"] = setting("logfmt", "key=value, or an object a line", "a machine reads the logs")


class HistorySection(Section):
    """`[history]`: how the run went, in `history.jsonl` of each region's folder; may differ between regions."""

    every: Span = setting(
        Duration(2_000_000_000),
        "time between two rows of `history.jsonl`; further apart in a long run",
        "curves are too coarse",
        examples=["10s"],
    )


class RegionSection(Section):
    """`[regions.NAME]`: one region."""

    address: HostPort | None = setting(
        None, "HOST:PORT where others dial it; none: it dials them. At most one region without", "always"
    )
    listen: HostPort | None = setting(
        None, "HOST:PORT to bind; none: all interfaces, at the address' port", "behind NAT"
    )
    admin_port: Port = setting(
        0, "status and metrics on loopback; 0: a free one, in `admin.port` of its folder", "you want it known"
    )
    admin_host: AdminHost = setting(
        "127.0.0.1",
        "one more address to bind for them",
        "containers; whoever reaches it can read the status",
        examples=["172.20.0.2"],
    )
    joined: Count = setting(
        0,
        "changes of the members when this region joined a run that had begun; 0: it founds the run",
        "never: `start --join` writes it",
    )
    measure_port: Port = setting(0, "port of `measure serve`; 0: the region's port", "beside a daemon")
    egress: Ceiling | None = ceiling("ceiling of this region, instead of `budget.egress`", "its line is another one")
    ingress: Ceiling | None = ceiling("ceiling of this region, instead of `budget.ingress`", "its line is another one")
    payload_archive: bool = setting(
        False, "keeps all payloads and the whole ledger, without end", "you want `replay`, or earlier versions back"
    )


class Tree(Section):
    """All of run.toml."""

    run: RunSection
    model: ModelSection = ModelSection()
    rounds: RoundsSection = RoundsSection()
    data: DataSection = DataSection()
    learner: LearnerSection = LearnerSection()
    budget: BudgetSection = BudgetSection()
    log: LogSection = LogSection()
    history: HistorySection = HistorySection()
    regions: dict[str, RegionSection]
