"""The plots of docs/evidence.md, and tables of docs/, from the kept results in benchmarks/results.

    python benchmarks/plots.py

`rounds*.json` are results of `peers.py --json`; of two rows for the same arm, link, size and number of regions the one
of the last file counts. `quality.jsonl` has the runs of `quality.py`. `figures.json` has what other benchmarks
measured. Colours are readable on light and on dark.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from quality_lines import Setting, read, table

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
DOCS = HERE.parent / "docs"
LABELS = {
    "ours": "ours",
    "ours_fp32": "ours, fp32",
    "allreduce": "all-reduce",
    "torchft": "torchft 0.2.0",
    "torchft_nightly": "torchft, newest",
    "hivemind": "hivemind",
    "pccl": "PCCL",
}
LINKS = {
    "loopback": "loopback",
    "1g": "1 Gbit/s, 20 ms",
    "2g": "2 Gbit/s, 40 ms",
    "lossy": "200 Mbit/s, 100 ms, 1 % loss",
    "home": "100 Mbit/s out, 500 in, 30 ms",
}
COLOURS = ("#4c7fd9", "#d9822b", "#3a9a5b", "#b565c9", "#c9505a", "#8a7f5c", "#2f9c9c", "#808080", "#a0703c")
WIDTH = 720
LEFT, RIGHT, TOP = 60, 20, 46
BAR, ROW = 12, 18

STYLE = """\
  <style>
    .page { fill: #ffffff; stroke: #c9ced8; }
    text { font: 13px system-ui, sans-serif; fill: #1b2230; }
    .title { font-weight: 600; font-size: 15px; }
    .axis { stroke: #8b93a3; }
    .grid { stroke: #8b93a3; stroke-opacity: 0.25; }
    .law { stroke: #8b93a3; stroke-width: 2; stroke-dasharray: 6 4; fill: none; }
    @media (prefers-color-scheme: dark) { .page { fill: #171b24; stroke: #394254; } text { fill: #e4e8f0; } }
  </style>
"""


@dataclass(frozen=True, slots=True)
class Point:
    """A mark of a scatter plot. error: half the bar through it. group: what colours it. words: beside it."""

    x: float
    y: float
    group: str
    error: float = 0.0
    words: str = ""


def document(title: str, height: float, body: Iterable[str]) -> str:
    """A whole SVG."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img">\n'
    page = f'  <rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="6" class="page"/>\n'
    shown = [f"  <title>{escape(title)}</title>\n", STYLE, page, text(10, 22, title, "title"), *body]
    return head + "".join(shown) + "</svg>\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text."""
    return f'  <text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>\n'


def stroke(start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    """A straight line."""
    return f'  <line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" class="{kind}"/>\n'


def bars(title: str, groups: Mapping[str, Sequence[tuple[str, float, str]]]) -> str:
    """Horizontal bars in groups, each to its own scale; a bar has a label, a length and the words after it."""
    label_x = 200.0
    colours = {label: COLOURS[n % len(COLOURS)] for n, label in enumerate(_labels(groups))}
    body, y = [], float(TOP)
    for name, group in groups.items():
        body.append(text(10, y + BAR - 1, name, "title"))
        y += ROW + 2
        scale = (WIDTH - label_x - 190) / max(value for _, value, _ in group)
        for label, value, words in group:
            body.append(text(label_x - 8, y + BAR - 1, label, anchor="end"))
            size = f'width="{max(1.0, value * scale):.1f}" height="{BAR}"'
            body.append(f'  <rect x="{label_x}" y="{y:.1f}" {size} fill="{colours[label]}"/>\n')
            body.append(text(label_x + value * scale + 6, y + BAR - 1, words))
            y += ROW
        y += 8
    return document(title, y + 6, body)


def _labels(groups: Mapping[str, Sequence[tuple[str, float, str]]]) -> list[str]:
    return list(dict.fromkeys(label for group in groups.values() for label, _, _ in group))


def scatter(
    title: str,
    axes: tuple[str, str],
    points: Sequence[Point],
    ticks: tuple[Mapping[float, str], Sequence[float]],
    law: Sequence[tuple[float, float]] = (),
) -> str:
    """Points over a logarithmic x axis; a dashed line through `law`."""
    x_ticks, y_ticks = ticks
    names = list(dict.fromkeys(point.group for point in points))
    low, high = math.log(min(x_ticks)), math.log(max(x_ticks))
    bottom = 310.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - low) / (high - low)
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), bottom - up * (bottom - TOP)

    body = []
    for value, words in x_ticks.items():
        x, _ = place(value, y_ticks[0])
        body.append(text(x, bottom + 18, words, anchor="middle"))
    for value in y_ticks:
        _, y = place(min(x_ticks), value)
        body.append(stroke((LEFT, y), (WIDTH - RIGHT, y), "grid" if value != y_ticks[0] else "axis"))
        body.append(text(LEFT - 8, y + 4, f"{value:g}", anchor="end"))
    body.append(text(WIDTH - RIGHT, bottom + 38, axes[0], anchor="end"))
    body.append(text(10, TOP - 8, axes[1]))
    if law:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*value) for value in law))
        body.append(f'  <polyline points="{path}" class="law"/>\n')
    for number, group in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        body.append(f'  <circle cx="{LEFT}" cy="{bottom + 34 + ROW * number:.0f}" r="5" fill="{colour}"/>\n')
        body.append(text(LEFT + 12, bottom + 38 + ROW * number, group))
        for point in (point for point in points if point.group == group):
            x, y = place(point.x, point.y)
            if point.error:
                ends = [place(point.x, point.y + sign * point.error)[1] for sign in (-1, 1)]
                body.append(f'  <path d="M{x:.1f} {ends[0]:.1f} V{ends[1]:.1f}" stroke="{colour}" stroke-width="2"/>\n')
            body.append(f'  <circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>\n')
            body.extend([text(x + 8, y + 4, point.words)] if point.words else [])
    return document(title, bottom + 34 + ROW * len(names), body)


# ---- what is shown ---------------------------------------------------------------------------------------------------


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of all kept rounds, in the order of links, regions, sizes and arms."""
    rows = {}
    for path in sorted(folder.glob("rounds*.json")):
        result = json.loads(path.read_text())
        for row in result["rows"]:
            rows[row["link"], row["regions"], row["parameters"], row["arm"]] = {**row, "date": result["date"]}
    order = list(LABELS)
    return [
        rows[key] for key in sorted(rows, key=lambda key: (list(LINKS).index(key[0]), *key[1:3], order.index(key[3])))
    ]


def setting(row: Mapping[str, Any]) -> str:
    """Link, regions and size in words."""
    return f"{LINKS[row['link']]}, {row['regions']} regions, {row['parameters'] / 1e6:.0f} M"


def rounds_plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """Seconds of a round by link and arm."""
    groups: dict[str, list[tuple[str, float, str]]] = {}
    for row in rows:
        if "reason" not in row:
            words = f"{row['seconds']:.2f} s, still {row['still_seconds']:.2f} s"
            groups.setdefault(setting(row), []).append((LABELS[row["arm"]], row["seconds"], words))
    return bars("Seconds of a round", groups)


def rounds_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in Markdown, a table for each setting. Bold: slower than torchft, or it did not come back."""
    lines: list[str] = []
    peers = {setting(row): row["seconds"] for row in rows if row["arm"] == "torchft" and "reason" not in row}
    for before, row in zip([None, *rows], rows, strict=False):
        if before is None or setting(before) != setting(row):
            lines += [
                "",
                f"| {setting(row)} | s (least to most) | still, s | MB | CPU-s | cut |",
                "|---|---|---|---|---|---|",
            ]
        start = f"| {LABELS[row['arm']]} |"
        if "reason" in row:
            lines.append(f"{start} {row['reason'].replace('|', '/')} | | | | |")
            continue
        seconds = f"{row['seconds']:.2f} ({row['seconds_min']:.2f} to {row['seconds_max']:.2f})"
        if row["arm"].startswith("ours") and row["seconds"] > peers.get(setting(row), math.inf):
            seconds = f"**{seconds}**"
        cuts = "; ".join(after(cut) for cut in row["cuts"])
        lines.append(
            f"{start} {seconds} | {row['still_seconds']:.2f} | {row['wire_bytes'] / 1e6:.0f} | "
            f"{row['cpu_seconds']:.2f} | {cuts} |"
        )
    loads = [row["load"] for row in rows if "load" in row]
    if loads:
        dates = sorted({row["date"] for row in rows})
        lines += ["", f"{' and '.join(dates)}, load average {min(loads):.1f} to {max(loads):.1f}."]
    return "\n".join(lines).strip()


def after(cut: Mapping[str, Any]) -> str:
    """What a cut did, in a cell."""
    if cut["back_seconds"] is None:
        return f"**{str(cut['reason']).replace('|', '/')}**"
    others = f"; others {cut['others']} rounds" if cut["others"] else ""
    return f"{100 * cut['made']:.0f} %{others}; {cut['back_seconds']:.1f} s"


# ---- training quality ------------------------------------------------------------------------------------------------


def law_percent(law: Sequence[tuple[float, float]], parameters: float) -> float:
    """The published loss above data-parallel's, in percent, by interpolation over the logarithm of the size."""
    (small, high), (large, low) = law
    return high + (low - high) * math.log(parameters / small) / math.log(large / small)


def plain(settings: Sequence[Setting]) -> list[Setting]:
    """Those in which nothing but codec, H, size and M differs from the defaults; each size at its longest schedule."""
    longest: dict[str, int] = {}
    for setting in settings:
        size = setting.facts["size"]
        longest[size] = max(longest.get(size, 0), setting.facts["steps"])
    ours = [setting for setting in settings if setting.facts["arm"] == "ours" and setting.gaps]
    return [
        setting for setting in ours if _is_plain(setting) and setting.facts["steps"] == longest[setting.facts["size"]]
    ]


def _is_plain(setting: Setting) -> bool:
    facts = setting.facts
    return facts["merge"] == "rda" and facts["outer"] in ("0.5 / 0.6", "0.7 / 0.3") and "," not in facts["codec"]


def _million(setting: Setting) -> str:
    return f"{setting.facts['parameters'] / 1e6:.2g} M"


def quality_table(settings: Sequence[Setting], law: Sequence[tuple[float, float]]) -> str:
    """By size, M, codec and H. Bold: above half of the law."""
    lines = [
        "| parameters, M | tokens each | codec up, H | bits | seeds | loss | above data-parallel | half of the law |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for setting in plain(settings):
        facts, half = setting.facts, law_percent(law, setting.facts["parameters"]) / 2
        mark = "**" if setting.gap > half else ""
        lines.append(
            f"| {_million(setting)}, {facts['learners']} | {facts['tokens'] / facts['parameters']:.2g} "
            f"| {facts['codec']}, {facts['every']} | {setting.bits:.2f} | {len(setting.losses)} "
            f"| {fmean(setting.losses.values()):.4f} | {mark}{setting.gap_words}{mark} | {half:.1f} % |"
        )
    return "\n".join(lines)


def _percents(points: Sequence[Point]) -> range:
    """Ticks from 0 to above all points."""
    return range(1 + max(4, math.ceil(max((point.y + point.error for point in points), default=0))))


def bits_plot(settings: Sequence[Setting]) -> str:
    """Loss over bits up, by codec."""
    points = [
        Point(
            setting.bits,
            setting.gap,
            f"{setting.facts['codec']}, {_million(setting)}",
            setting.error,
            f"H {setting.facts['every']}",
        )
        for setting in plain(settings)
    ]
    return scatter(
        "Loss above data-parallel's by bits that a learner sends, four learners",
        ("bits per parameter and 1,000 tokens", "%"),
        points,
        ({0.1: "0.1", 0.2: "0.2", 0.5: "0.5", 1.0: "1", 2.0: "2", 5.0: "5"}, _percents(points)),
    )


def tables(folder: Path) -> dict[str, dict[str, str]]:
    """Tables by page, and by the name of the place on it."""
    settings = read(folder / "quality.jsonl")
    others = [setting for setting in settings if setting.gaps and setting not in plain(settings)]
    law = json.loads((folder / "figures.json").read_text())["loss"]["law"]
    return {
        "evidence.md": {
            "rounds": rounds_table(rows_of(folder)),
            "quality": quality_table(settings, law),
        },
        "notebook/results-quality.md": {"runs": table(others)},
    }


def plots(folder: Path) -> dict[str, str]:
    """Every plot, by its file's name."""
    figures = json.loads((folder / "figures.json").read_text())
    loss, goodput = figures["loss"], figures["goodput"]
    settings = read(folder / "quality.jsonl")
    sizes = [Point(point["parameters"], point["gap"], point["group"], point["error"]) for point in loss["points"]]
    sizes += [
        Point(
            setting.facts["parameters"],
            setting.gap,
            f"ours, M = {setting.facts['learners']}, H = {setting.facts['every']}",
            setting.error,
        )
        for setting in plain(settings)
        if setting.facts["codec"] == "int4"
    ]
    codecs = [(row["codecs"], row["megabytes"], f"{row['megabytes']:g} MB") for row in figures["codecs"]["rows"]]
    return {
        "rounds.svg": rounds_plot(rows_of(folder)),
        "loss.svg": scatter(
            "Loss above data-parallel's, four learners",
            ("parameters", "%"),
            sizes,
            ({1e5: "0.1 M", 1e6: "1 M", 1e7: "10 M", 1e8: "100 M"}, _percents(sizes)),
            law=loss["law"],
        ),
        "goodput.svg": scatter(
            "Goodput in a storm of kills, four regions",
            ("seconds between two kills, mean", "%"),
            [
                Point(point["seconds"], point["goodput"], arm)
                for arm, points in goodput["arms"].items()
                for point in points
            ],
            ({1.0: "1", 2.0: "2", 4.0: "4", 8.0: "8"}, range(0, 101, 20)),
        ),
        "bits.svg": bits_plot(settings),
        "codecs.svg": bars("Bytes that a region sends in a round", {figures["codecs"]["setting"]: codecs}),
    }


def main() -> int:
    """Write plots and table."""
    for name, svg in plots(RESULTS).items():
        (DOCS / "evidence" / name).write_text(svg)
    for name, places in tables(RESULTS).items():
        page = DOCS / name
        content = page.read_text()
        for place, rows in places.items():
            start, end = f"<!-- {place}: benchmarks/plots.py -->", f"<!-- end of {place} -->"
            head, _, rest = content.partition(start)
            content = f"{head}{start}\n\n{rows}\n\n{end}{rest.partition(end)[2]}"
        page.write_text(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
