"""docs/settings.md: every setting with unit, default and bounds from the schema, and when to touch it.

After a change: `python -m tests.kit.settings_page > docs/settings.md`.
"""

import sys

from diloco_node.config.field_types import changes, touch_when
from diloco_node.config.reference import SECTIONS, allowed, default_text, settings

COMMAND = "python -m tests.kit.settings_page > docs/settings.md"
ABOUT = {
    "run": "What the run is called, when it ends, and where things lie.",
    "rounds": "How regions merge. The same in all regions.",
    "model": "The built-in trainer, or its recipe for a model of Hugging Face. Not for a command of your own.",
    "data": "Text for the built-in trainer and for the recipe of `[model] hf`.",
    "learner": "The process that trains, whichever it is.",
    "log": "The daemon's log in `logs/`.",
    "history": "How the run went, in `history.jsonl` of each region's folder.",
    "budget": "What each region may send and receive, in bytes on the wire.",
    "budget.per_peer.NAME": "What goes to one region and comes from it.",
    "budget.schedule": "Other ceilings between two times of day; `[[budget.schedule]]`, once for each.",
    "regions.NAME": "One region, one table each.",
}
HEAD = f"""# Settings

Every setting of `run.toml`, made from the schema by `{COMMAND}`.
`config show --origin` shows each value and where it comes from. The few that matter most are on the page
[Run on real machines](run.md#2-write-runtoml).

Lengths of time are written with a unit, as `"200ms"`, `"5min"`. So are rates, as `"2Gbit/s"` or `"25MB/s"`.

## May it change in a run?

| in the tables | what it means |
|---|---|
| fixed | not in a run: `start` refuses it and names both values, of a model the daemon does |
| same | not in a run: it must be the same in all regions, and **nobody compares it** |
| set | yes: `diloco-node config set`, at one entry of the ledger. Once a run has begun, the ledger's value counts |
| all | yes: stop all regions, change it in each, start them. Regions that differ refuse each other and name it |
| region | yes: in one region, when that is started again |
| running | yes: SIGHUP to `start`, or `diloco-node budget set` |
| new run | it has no effect once a run has begun |

`start` says what changed since the last one, and what `run.toml` has otherwise than the run. More:
[Settings of the run](operate.md#settings-of-the-run).
"""


def settings_page() -> str:
    """The page, as it is in docs/."""
    fields = dict(settings())
    lines = [HEAD]
    for prefix, section in SECTIONS.items():
        lines.append(f"## [{prefix}]\n\n{ABOUT[prefix]}\n")
        lines.append(
            "| setting | default | allowed | changes | what it is | touch it when |\n|---|---|---|---|---|---|"
        )
        for name in section.model_fields:
            if (field := fields.get(f"{prefix}.{name}")) is not None:
                words = (changes(field), field.description or "", touch_when(field))
                cells = (f"`{name}`", default_text(field), allowed(field), *words)
                lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.stdout.write(settings_page())
