"""What each setting is, with its unit, and when to touch it: the words of docs/settings.md."""

from __future__ import annotations

from typing import Final

_SELDOM: Final = "seldom"

NOTES: Final[dict[str, tuple[str, str]]] = {
    # run
    "run.id": ("the run's name, in every certificate and in the ledger", "each new run"),
    "run.tokens": ("end of the run by merged tokens of all regions; 0: no end", "you plan by tokens"),
    "run.steps": ("end of the run by inner steps of the median learner; 0: no end", "you plan by steps"),
    "run.seed": ("of parameters, data order and election timeouts", "you repeat a run with other luck"),
    "run.state_dir": (
        "folder of all regions' state, one folder each",
        "the disk is elsewhere; a new run beside an old one",
    ),
    "run.certs_dir": ("folder that `certs init` made", "certificates lie elsewhere"),
    "run.init": (
        "a safetensors file with the first parameters",
        "you go on from a model; regions start with other seeds",
    ),
    # rounds
    "rounds.fragments": (
        "P: parts of the model, merged one after the other",
        "the model is small (fewer), or peaks of bandwidth are too high (more)",
    ),
    "rounds.sync_every": (
        "H: inner steps between two merges of one fragment",
        "`plan` says that it does not fit: larger",
    ),
    "rounds.overlap_steps": (
        "tau: inner steps that a round may take; less than `sync_every`",
        "rounds take longer than so many steps",
    ),
    "rounds.quorum_min": (
        "learners that must be due before a round opens; 0: a majority of the live ones",
        "you want no merge below so many regions",
    ),
    "rounds.grace_gamma": (
        "part of a round's slack for which a round waits for learners that are not due",
        "slow regions are left out too often (higher), or rounds start too late (lower)",
    ),
    "rounds.rounds_in_flight_max": (
        "rounds open at once, of different fragments",
        '`status` often says "rounds in flight"',
    ),
    "rounds.outer_lr": (
        "learning rate of the outer step; none: by the run's length in cycles of H steps",
        "you have tuned it. A change of `run.steps` or `sync_every` changes the default",
    ),
    "rounds.outer_momentum": ("Nesterov momentum of the outer step; none: by the run's length", "as `outer_lr`"),
    "rounds.merge": (
        "`rda`: direction and length averaged apart; `avg`: weighted mean. Embeddings and head are always averaged",
        "you compare with plain DiLoCo",
    ),
    "rounds.codec_up": ("how contributions travel", "links are fast and you want exact values"),
    "rounds.codec_down": (
        "how merged fragments travel",
        "as `codec_up`; `int4` halves what regions send to each other",
    ),
    "rounds.carry": (
        "`carry`: steps that a merge left out go into a later one; `overwrite`: they are thrown away, as in the paper",
        "you compare with the paper",
    ),
    "rounds.carry_steps_max": (
        "inner steps up to which carried work counts in full; beyond it counts less. 0: 4 H",
        "regions are often cut off for longer",
    ),
    "rounds.weight_cap": (
        "a region that was away weighs at most so many times the median of its round",
        "long outages move the model too much (lower)",
    ),
    "rounds.error_feedback": (
        "what rounding the merged values lost goes into the next round",
        "`codec_down` is `int4`",
    ),
    "rounds.heartbeat": (
        "time between two heartbeats of the leader; at most a third of `election_timeout`",
        "`election_timeout`",
    ),
    "rounds.election_timeout": (
        "silence of the leader after which another is elected; drawn from one to two of it",
        "machines stand still for seconds, or round trips are above 300 ms: higher",
    ),
    "rounds.ballot_deadline_min": ("no attempt at a round is given less time", "links stall for seconds: higher"),
    "rounds.payload_versions": ("merged payloads that a region keeps on disk beyond its last checkpoint", _SELDOM),
    "rounds.checkpoint_versions": (
        "merges of a fragment between two of its states on disk",
        "the disk is slow: higher",
    ),
    "rounds.summary_entries": ("ledger entries between two sums, and kept behind the last", _SELDOM),
    # model
    "model.hf": ("a causal language model of Hugging Face: its name, or its folder", "you train such a model"),
    "model.hf_args": ("`TrainingArguments` of that model's training, by name", "you set `hf`"),
    "model.layers": ("blocks of the transformer", "you choose a size"),
    "model.dim": ("width; a multiple of 2 x `heads`", "you choose a size"),
    "model.heads": ("attention heads", "you choose a size"),
    "model.context": ("tokens in a sequence", "you choose a size"),
    "model.batch": ("sequences in an inner step of this region", "the device has room for more, or not enough"),
    "model.lr": ("peak learning rate of the inner optimizer", "always, with the size of the model"),
    "model.schedule_steps": (
        "length of the cosine schedule in steps of the median learner; 0: the run's",
        "the run has no end",
    ),
    "model.eval_every": ("steps of the run between held-out losses; 0: only at the end", "evaluations take too long"),
    "model.eval_windows": ("sequences of one held-out loss", "the loss is noisy"),
    "model.threads": ("CPU threads of torch", "you train on a CPU"),
    "model.step_time_min": ("an inner step takes at least so long", "demos and tests"),
    "model.ranks": ("processes that `start` has torchrun start on this machine", "the machine has several devices"),
    "model.shard": ("whether each rank has a part of the model, or all of it", "with `ranks`"),
    # data
    "data.paths": ("files or folders of text, JSONL or Parquet, or `hf:NAME`; none: Python's own sources", "always"),
    "data.text_field": ("what holds the text of a row", "rows have another name for it"),
    "data.streaming": ("rows are tokenised as they are trained, and not kept", "the corpus is larger than the disk"),
    # learner
    "learner.hang": (
        "no step for so long, and for ten times its longest pause, and it is started again; 0s: never",
        "steps or evaluations take minutes",
    ),
    "learner.on_spike": (
        "what follows when the loss leaves its range several times in a row",
        "runs are long and unattended",
    ),
    "learner.preload": ("modules imported once, from which restarted learners are forked", "restarts must be fast"),
    # budget
    "budget.egress": (
        "ceiling of what each region sends, all links together; none: no limit",
        "the line is shared or paid",
    ),
    "budget.ingress": ("the same of what it receives", "the line is shared or paid"),
    "budget.per_peer.NAME.egress": ("ceiling of what goes to that region", "one link is narrow or dear"),
    "budget.per_peer.NAME.ingress": ("ceiling of what comes from it", "one link is narrow or dear"),
    "budget.schedule.egress": ("instead of `budget.egress`; none: as ever", "the line is free at night"),
    "budget.schedule.ingress": ("instead of `budget.ingress`; none: as ever", "the line is free at night"),
    "budget.schedule.start": ("time of day by this machine's clock, as `22:00`", "with a schedule"),
    "budget.schedule.end": ("the same; before `start`: on the next day", "with a schedule"),
    # log, history
    "log.level": ("lines from this one on; `log-level` changes it while the region runs", "logs are too long"),
    "log.format": ("key=value, or an object a line", "a machine reads the logs"),
    "history.every": ("between two rows of `history.jsonl`; further apart in a long run", "curves are too coarse"),
    "history.to": ("who gets the rows beside the file; each needs the extra of its name", "you watch curves elsewhere"),
    # regions
    "regions.NAME.address": (
        "HOST:PORT where others dial it; none: it dials them. At most one region without",
        "always",
    ),
    "regions.NAME.listen": ("HOST:PORT to bind; none: all interfaces, at the address' port", "behind NAT"),
    "regions.NAME.admin_port": (
        "status and metrics on loopback; 0: a free one, in `admin.port` of its folder",
        "you want it known",
    ),
    "regions.NAME.admin_host": (
        "one more address to bind for them",
        "containers; whoever reaches it can read the status",
    ),
    "regions.NAME.measure_port": (
        "where `measure serve` listens and is dialed; 0: the region's port",
        "beside a daemon",
    ),
    "regions.NAME.egress": ("ceiling of this region, instead of `budget.egress`", "its line is another one"),
    "regions.NAME.ingress": ("ceiling of this region, instead of `budget.ingress`", "its line is another one"),
    "regions.NAME.payload_archive": ("keeps all payloads and the whole ledger, without end", "you want `replay`"),
}
"""By key: what it is; when to touch it."""
