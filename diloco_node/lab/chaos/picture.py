"""Picture of a run: each region's life, its merges, and what struck it. A single SVG without scripts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

from diloco_node.lab.chaos.executor import StruckFault
from diloco_node.lab.chaos.story import LifeSpan, LifeState, TimedMerge
from diloco_node.numeric import NS_PER_S

COLOURS: Final = {
    LifeState.TRAINING: "#2a9d8f",
    LifeState.ALONE: "#8ab6d6",
    LifeState.CATCHING_UP: "#e9c46a",
    LifeState.STOPPED: "#9a9a9a",
    LifeState.DEAD: "#b23a48",
    LifeState.OUTSIDE: "#eeeeee",
}

WIDTH: Final = 1000
LEFT: Final = 110
RIGHT: Final = 20
TOP: Final = 60
ROW: Final = 52
BAND: Final = 22
"""In pixels: of a row its height, and that of its coloured band. Below the band stand the merges it is in."""

TICK: Final = 7
MARKS_ABOUT: Final = 10
"""Times along the axis."""

STEPS_S: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 86_400)


def draw_life(
    title: str,
    spans: Mapping[str, Sequence[LifeSpan]],
    merges: Sequence[TimedMerge],
    faults: Sequence[StruckFault],
    *,
    end_ns: int,
) -> str:
    """The picture as text.

    Args:
        spans: per region; drawn in this order. merges, faults: those outside of the window are left out.
        end_ns: of the window, above 0.
    """
    height = TOP + ROW * len(spans) + 40
    scale = (WIDTH - LEFT - RIGHT) / end_ns

    def x(at_ns: int) -> float:
        return round(LEFT + at_ns * scale, 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>',
        *_legend(),
    ]
    for row, (name, life) in enumerate(spans.items()):
        y = TOP + row * ROW
        lines.append(f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        for span in life:
            seconds = (span.to_ns - span.from_ns) / NS_PER_S
            lines.append(
                f'<rect x="{x(span.from_ns)}" y="{y}" width="{round((span.to_ns - span.from_ns) * scale, 1)}" '
                f'height="{BAND}" fill="{COLOURS[span.state]}"><title>{span.state} for {seconds:.1f} s</title></rect>'
            )
        times = [merge.at_ns for merge in merges if name in merge.members and 0 < merge.at_ns <= end_ns]
        ticks = "".join(f"M{x(at_ns)} {y + BAND + 2}v{TICK}" for at_ns in times)
        if ticks:
            lines.append(f'<path d="{ticks}" stroke="#444" stroke-width="0.6"/>')
        lines += [
            _fault_mark(fault, x(fault.at_ns), y)
            for fault in faults
            if fault.fault.target.region == name and not fault.is_missed and 0 <= fault.at_ns <= end_ns
        ]
    lines += _axis(x, end_ns, TOP + ROW * len(spans))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _fault_mark(fault: StruckFault, x: float, y: int) -> str:
    """A triangle above the band, with the first letter of what it struck, or the order."""
    letter = fault.fault.kind if fault.is_order else fault.fault.target.part[0].upper()
    title = f"{fault.fault.kind} {fault.fault.target} at {fault.at_ns / NS_PER_S:.1f} s"
    return (
        f'<g><title>{escape(title)}</title><path d="M{x} {y}l-4 -7h8z" fill="black"/>'
        f'<text x="{x}" y="{y - 8}" font-size="8" text-anchor="middle">{letter}</text></g>'
    )


def _legend() -> list[str]:
    lines, x = [], LEFT
    for state, colour in COLOURS.items():
        lines.append(f'<rect x="{x}" y="28" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 17}" y="38">{state}</text>')
        x += 40 + 7 * len(state)
    lines.append(f'<text x="{x}" y="38">| in a merge</text>')
    x += 90
    lines.append(f'<text x="{x}" y="38">&#9660; struck: Daemon, Learner, Supervisor, Region</text>')
    return lines


def _axis(x: Callable[[int], float], end_ns: int, y: int) -> list[str]:
    end_s = end_ns / NS_PER_S
    step_s = next((step for step in STEPS_S if end_s / step <= MARKS_ABOUT), STEPS_S[-1])
    lines = [f'<path d="M{x(0)} {y}H{x(end_ns)}" stroke="#444"/>']
    for second in range(0, int(end_s) + 1, step_s):
        at = x(second * NS_PER_S)
        lines.append(f'<path d="M{at} {y}v4" stroke="#444"/>')
        lines.append(f'<text x="{at}" y="{y + 16}" text-anchor="middle">{second} s</text>')
    return lines
