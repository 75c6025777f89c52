"""Regions whose data differ: held-out loss of each source before and after merges, and the alarms they would raise.

    python benchmarks/sources.py --fetch              # manual pages into runs/sources, once; wants apt and dpkg
    python benchmarks/sources.py --seeds 3            # 16 arms of 2,000 steps: an hour on one core, resumes
    python benchmarks/sources.py --arms own,mix --seeds 1 --json

Four sources: Python's standard library, and Debian's manual pages in German, French and Russian. Every step draws the
same 32 windows in all arms of equal batches: a region has those of its own source, or a quarter of each source's, or
data-parallel has all. Rounds, codec, apply rule and alarms are the product's. "Before" is a region's own parameters
just before a version arrives, "after" just after it, "merged" the newest version of all fragments.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from quality_lines import Lines
from quality_merge import Rounds, _Open
from quality_stack import Inner, Stack
from region_sampler import RegionSampler

from diloco_node.config.resolve import default_outer
from diloco_node.core.types import MergeRule, RunSettings
from diloco_node.daemon.effects.open_stripes import cosines
from diloco_node.daemon.effects.stripe_effects import COSINES_KEPT
from diloco_node.daemon.standings import Standings
from diloco_node.health.alerts import find_alerts
from diloco_node.learner.builtin.data import Corpus, load_corpus
from diloco_node.learner.builtin.shape import ModelSettings
from diloco_node.numeric import F32

REVISION: Final = 1
SOURCES: Final = ("python", "de", "fr", "ru")
BATCH, CONTEXT, SYNC_EVERY, OVERLAP, RATE = 8, 32, 16, 2, 4e-3
UNEQUAL_BYTES: Final = tuple(part << 16 for part in (8, 4, 2, 1))
HELD_OUT_WINDOWS, POINT_WINDOWS = 2048, 128
POINTS: Final = (0.125, 0.25, 0.5, 0.75)
"""Parts of the run after which losses before and after a merge are kept; the end is one, too."""

NORMAL: Final = ("outlier", 0.0)
"""Left out of the key of a run."""

ALARMS: Final = ("A-AGAINST", "A-TOO-LONG", "A-OUTWEIGHS")

_LETTERS: Final = {"aq": "'", "dq": '"', "en": "-", "em": "—", "lq": "“", "rq": "”", "bu": "•", "ha": "^", "ti": "~"}
_ESCAPES: Final = re.compile(
    r"\\(?:f(?:\[\w*\]|\(\w\w|.)|s[-+]?\d+|\*?\((?P<name>\w\w)|\*?\[(?P<long>[^]]*)\]|(?P<other>.))"
)
_OTHERS: Final = {"e": "\\", "-": "-", " ": " ", "~": " ", "'": "'", "`": "`", ".": ".", "\\": "\\"}
_KEPT_MACROS: Final = re.compile("(?!TH|Dd|Dt|Os)[A-Z][A-Za-z]?")


def plain(troff: str) -> str:
    """The words of a manual page: without comments, requests, fonts and most escapes."""
    lines = []
    for line in troff.splitlines():
        request = re.match(r"[.']\s*([A-Za-z]*)\s*(.*)", line)
        if request and _KEPT_MACROS.fullmatch(request[1]):
            lines += [*[""] * (request[1][0] in "PLST"), request[2].replace('"', "")]
        elif request is None:
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", _ESCAPES.sub(_letter, "\n".join(lines)))


def _letter(escape: re.Match[str]) -> str:
    return _LETTERS.get(escape["name"] or escape["long"] or "") or _OTHERS.get(escape["other"] or "", "")


def fetch(folder: Path) -> None:
    """Download the packages, and write the text of every manual page; says bytes and SHA-256 of both."""
    for source in SOURCES[1:]:
        place = folder / source
        (place / "text").mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", f"manpages-{source}"], cwd=place, check=True, stdout=subprocess.DEVNULL)
        (package,) = place.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", package, place / "package"], check=True)
        content = package.read_bytes()
        print(f"{package.name}: {len(content)} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}")
        for page in sorted((place / "package" / "usr/share/man" / source).rglob("*.gz")):
            words = plain(gzip.decompress(page.read_bytes()).decode("utf-8", "replace"))
            if not page.is_symlink() and len(words) > 200:
                (place / "text" / page.stem).write_text(words)
    for source, corpus in zip(SOURCES, load_sources(folder), strict=True):
        print(f"{source}: {len(corpus.train)} bytes, {len(corpus.held_out)} held out, SHA-256 {digest(corpus)}")


def load_sources(folder: Path) -> list[Corpus]:
    """The text of each source, in their order."""
    if missing := [source for source in SOURCES[1:] if not (folder / source / "text").exists()]:
        sys.exit(f"no text of {', '.join(missing)} in {folder}: run benchmarks/sources.py --fetch")
    return [load_corpus([folder / source / "text"] if source != SOURCES[0] else ()) for source in SOURCES]


def digest(corpus: Corpus) -> str:
    """SHA-256 of its text, in hex."""
    return hashlib.sha256(corpus.train.tobytes() + corpus.held_out.tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train on the sources.

    Attributes:
        regions: "own", each has its own source; "mix", each a quarter of every source's windows; "all", there is one,
            with all windows (data-parallel); "alone", each has its own source and nothing is merged.
        leaves: from half-way the last source is there no more.
        bytes_max: of each source's text; None: all of it. batches: windows of each source in a step.
        outlier: the last region brings so many times what it learnt, -1 for its opposite; 0: what it learnt.
    """

    name: str
    regions: str = "own"
    leaves: bool = False
    bytes_max: tuple[int | None, ...] = (None,) * 4
    batches: tuple[int, ...] = (BATCH,) * 4
    merge: MergeRule = MergeRule.RDA
    sync_every: int = SYNC_EVERY
    outlier: float = 0.0


OWN: Final = Arm("own")
REPEATED: Final = replace(OWN, bytes_max=UNEQUAL_BYTES)
TOKENS: Final = replace(REPEATED, batches=(16, 8, 4, 2))
ARMS: Final = (
    OWN,
    replace(OWN, name="mix", regions="mix"),
    replace(OWN, name="data_parallel", regions="all"),
    replace(OWN, name="alone", regions="alone"),
    replace(OWN, name="leaves", leaves=True),
    replace(OWN, name="data_parallel_leaves", regions="all", leaves=True),
    replace(TOKENS, name="tokens"),
    replace(TOKENS, name="tokens_data_parallel", regions="all"),
    replace(REPEATED, name="repeated"),
    replace(REPEATED, name="repeated_data_parallel", regions="all"),
    replace(REPEATED, name="repeated_alone", regions="alone"),
    replace(OWN, name="own_trimmed", merge=MergeRule.TRIMMED),
    replace(OWN, name="own_h64", sync_every=64),
    replace(OWN, name="own_avg", merge=MergeRule.AVG),
    replace(OWN, name="own_flipped", outlier=-1.0),
    replace(OWN, name="mix_flipped", regions="mix", outlier=-1.0),
)


class WatchedRounds(Rounds):
    """Rounds that the alarms of the product look at, as each of four reducers sees its quarter of the blocks."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self.rounds = 0
        self.alarms: Counter[str] = Counter()
        self.seen: list[list[float]] = [[] for _ in range(self.learners)]
        self.lowest = [1.0] * self.learners
        self._cosines: list[dict[str, deque[float]]] = [{} for _ in range(self.learners)]
        self._standings = [Standings(recent) for recent in self._cosines]

    def observe(self, one: _Open, weighed: Sequence[float]) -> None:
        """Count the rounds after which an alarm stood in any region, by alarm and the region it names."""
        pairs = zip(one.contributions, weighed, strict=True)
        body: Any = SimpleNamespace(members=[SimpleNamespace(contribution=c, weight=w) for c, w in pairs])
        blocks, standing = self._up[one.fragment], set()
        for reducer, recent in enumerate(self._cosines):
            first, stop = (blocks.block_count * at // self.learners for at in (reducer, reducer + 1))
            stripe: Any = SimpleNamespace(block_start=first, block_stop=stop, version=one.version)
            start, size = blocks.span_bytes(0, first), blocks.span_bytes(first, stop)
            values = cosines(stripe, [encoded[start : start + size] for encoded in one.encoded], blocks)
            for m, contribution, value in zip(one.snapshots, one.contributions, values, strict=True):
                recent.setdefault(contribution.learner, deque(maxlen=COSINES_KEPT)).append(value)
                self.seen[m].append(value)
                if len(recent[contribution.learner]) == COSINES_KEPT:
                    self.lowest[m] = min(self.lowest[m], statistics.fmean(recent[contribution.learner]))
            self._standings[reducer].observe(body)
            facts = {"state": "training", "role": "leader", "tokens_ratio_max": self.settings.tokens_ratio_max}
            for alert in find_alerts({**facts, "standings": self._standings[reducer].document()}):
                if alert.code in ALARMS:
                    standing.add(f"{alert.code} {SOURCES[int(alert.regions[0][-2:])]}")
        self.rounds += 1
        self.alarms.update(standing)


class Windows:
    """What each replica trains on: windows of the sources, the same in every arm with these batches."""

    def __init__(self, arm: Arm, corpora: Sequence[Corpus], *, seed: int) -> None:
        self._arm = arm
        self._samplers = [
            RegionSampler(replace(c, train=c.train[:size]), region=0, regions=1, batch=b, context=CONTEXT, seed=seed)
            for c, size, b in zip(corpora, arm.bytes_max, arm.batches, strict=True)
        ]

    def at(self, position: int, *, is_over: bool) -> list[Any]:
        """A batch for each replica. is_over: the last source is there no more; a region of its own gets it still."""
        batches = [sampler.batch_at(position) for sampler in self._samplers]
        if self._arm.regions == "all":
            return [np.concatenate(batches[: -1 if is_over else None])]
        if self._arm.regions == "mix":
            count = len(batches)
            return [np.concatenate([batch[m::count] for batch in batches]) for m in range(count)]
        return batches


def settings(arm: Arm, steps: int) -> RunSettings:
    """Those of the product's defaults, in four fragments."""
    outer = dict(zip(("outer_lr", "outer_momentum"), default_outer(steps // arm.sync_every), strict=True))
    return RunSettings(fragments=4, sync_every=arm.sync_every, overlap_steps=OVERLAP, merge=arm.merge, **outer)


def train(arm: Arm, *, steps: int, seed: int, corpora: Sequence[Corpus]) -> dict[str, Any]:
    """One run: losses by source, of the merged parameters or, where nothing is merged, of each region's own."""
    started = time.perf_counter()
    cycles = steps // arm.sync_every
    replicas = 1 if arm.regions == "all" else len(SOURCES)
    inner = Inner(lr=RATE, steps=steps, beta2=0.95 if arm.regions == "all" else 0.99)
    stack = Stack(ModelSettings(context=CONTEXT), inner, replicas=replicas, seed=seed)
    is_even = len(set(arm.batches)) == 1 or replicas == 1
    stacks = [stack] if is_even else [_like(stack, m, seed) for m in range(replicas)]
    windows, half = Windows(arm, corpora, seed=seed), steps // 2 // SYNC_EVERY * SYNC_EVERY
    rounds = None
    if arm.regions in ("own", "mix"):
        cut = (half, steps + 1) if arm.leaves else None
        tokens = [batch * CONTEXT for batch in arm.batches]
        more = {"tokens_per_step": tokens, "cut_steps": cut, "outlier": arm.outlier}
        rounds = WatchedRounds(settings(arm, steps), stack.shapes, stack.theta, **more)
    losses = partial(_losses, stack, corpora)
    marks = {int(part * cycles) * arm.sync_every + OVERLAP for part in POINTS}
    points = []
    for step in range(1, steps + 1):
        batches = windows.at(step - 1, is_over=arm.leaves and step > half)
        for place, each in enumerate(stacks):
            each.step(np.stack(batches if is_even else batches[place : place + 1]))
        is_point = rounds is not None and (step in marks or step == steps)
        before = [losses(row, POINT_WINDOWS) for row in stack.theta] if is_point else []
        if rounds and step < steps:
            rounds.after_step(step)
        elif rounds:
            rounds.finish(step)
        if rounds and is_point:
            after = [losses(row, POINT_WINDOWS) for row in stack.theta]
            merged = losses(rounds.global_parameters(), POINT_WINDOWS)
            points.append({"step": step, "before": before, "after": after, "merged": merged})
    final = [rounds.global_parameters()] if rounds else list(stack.theta)
    record = {"losses": [losses(row, HELD_OUT_WINDOWS) for row in final], "points": points}
    if arm.leaves and rounds:
        record["left"] = losses(stack.theta[-1], HELD_OUT_WINDOWS)
    if rounds:
        record["rounds"], record["alarms"] = rounds.rounds, dict(rounds.alarms)
        record["lowest"] = rounds.lowest
        record["cosines"] = [[statistics.fmean(seen), float(np.mean(np.array(seen) < 0.0))] for seen in rounds.seen]
    return {"arm": arm.name, "seed": seed, **record, "seconds": round(time.perf_counter() - started, 1)}


def _like(stack: Stack, m: int, seed: int) -> Stack:
    """A stack of one replica whose parameters are row m of another's."""
    return Stack(stack.settings, stack.inner, replicas=1, seed=seed, rows=stack.theta[m : m + 1])


def _losses(stack: Stack, corpora: Sequence[Corpus], row: F32, windows: int) -> list[float]:
    """Held-out loss of each source, nats per byte."""
    return [stack.loss(row, corpus.held_out_windows(windows, CONTEXT)) for corpus in corpora]


def key_of(arm: Any, steps: int, seed: int, data: str) -> str:
    """Names everything that a run depends on. data: the digest of its texts."""
    settings = {name: value for name, value in asdict(arm).items() if name != "name" and (name, value) != NORMAL}
    return json.dumps([REVISION, settings, steps, seed, data], sort_keys=True)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: losses at the end, losses around merges, alarms; means over the seeds."""
    ends, points, alarms = [], [], []
    for name in dict.fromkeys(record["arm"] for record in results):
        runs = [record for record in results if record["arm"] == name]
        mean = np.mean([run["losses"] for run in runs], axis=0)
        own = np.diag(mean) if len(mean) > 1 else mean[0]
        each = [np.mean(np.diag(run["losses"]) if len(mean) > 1 else run["losses"]) for run in runs]
        error = np.std(each, ddof=1) / len(each) ** 0.5 if len(each) > 1 else np.nan
        ends.append(_row(name, *own, own.mean(), error))
        if len(mean) > 1:
            ends.append(_row(f"{name}, others' sources", *(mean.sum(0) - own) / 3, (mean.sum() - own.sum()) / 12))
        if "left" in runs[0]:
            ends.append(_row(f"{name}, who left", *np.mean([run["left"] for run in runs], axis=0)))
        for at, point in enumerate(runs[0]["points"]):
            squares = [np.mean([run["points"][at][kind] for run in runs], axis=0) for kind in ("before", "after")]
            pairs = [(np.trace(square) / 4, (square.sum() - np.trace(square)) / 12) for square in squares]
            merged = np.mean([run["points"][at]["merged"] for run in runs])
            points.append(_row(f"{name} | {point['step']}", *pairs[0], *pairs[1], merged))
        if "cosines" in runs[0]:
            total = sum((Counter(run["alarms"]) for run in runs), Counter())
            alarms_text = ", ".join(f"{alarm} {count}" for alarm, count in sorted(total.items())) or "none"
            trios = np.mean([np.c_[run["cosines"], run.get("lowest", [np.nan] * 4)] for run in runs], axis=0)
            cells = [f"{cosine:.2f}, {low:.2f} ({100 * negative:.0f} %)" for cosine, negative, low in trios]
            alarms.append(_row(name, *cells, f"{alarms_text} of {sum(run['rounds'] for run in runs)}"))
    heads = (
        ("arm", *SOURCES, "mean", "error"),
        ("arm", "step", "before, own source", "others'", "after, own", "others'", "merged, all"),
        ("cosine: mean, least of 64 (negative)", *SOURCES, "rounds with an alarm"),
    )
    bodies = zip(heads, (ends, points, alarms), strict=True)
    return "\n\n".join("\n".join([_row(*head), f"|{'---|' * len(head)}", *body]) for head, body in bodies)


def _row(*cells: Any) -> str:
    return f"| {' | '.join(cell if isinstance(cell, str) else f'{cell:.3f}' for cell in cells)} |"


def command(
    doc: str, arms: Sequence[Any], train: Callable[..., Any], table: Callable[..., str], words: Sequence[str] | None
) -> int:
    """The command of a benchmark on these sources: run what the file of results lacks, and print it."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--arms", default="", help=f"comma-separated, of {', '.join(arm.name for arm in arms)}")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--fetch", action="store_true", help="download and prepare the texts, and say what they are")
    parser.add_argument("--folder", type=Path, default=Path("runs/sources"), help="of the texts and of the results")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    if options.fetch:
        fetch(options.folder)
        return 0
    by_name = {arm.name: arm for arm in arms}
    names = [name for name in options.arms.split(",") if name] or list(by_name)
    if unknown := sorted(set(names) - set(by_name)):
        parser.error(f"unknown arms {', '.join(unknown)}: use {', '.join(by_name)}")
    torch.set_num_threads(1)
    corpora, lines, results = load_sources(options.folder), Lines(options.folder / "results.jsonl"), []
    data = " ".join(digest(corpus)[:12] for corpus in corpora)
    for seed in range(1, options.seeds + 1):
        for name in names:
            run = partial(train, by_name[name], steps=options.steps, seed=seed, corpora=corpora)
            results.append(lines.record(key_of(by_name[name], options.steps, seed, data), run))
    print(json.dumps(results) if options.json else table(results))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command(__doc__ or "", ARMS, train, table, arguments)


if __name__ == "__main__":
    sys.exit(main())
