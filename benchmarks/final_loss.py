"""The final model of a demo beside an undisturbed run: held-out losses at equal tokens, over the same text.

    python benchmarks/final_loss.py RUN UNDISTURBED [--json]

Both are folders of `diloco-node demo` with one seed. The report's own comparison takes the last loss that a region
measured while it trained, and a region that has just come back may measure older parameters. This one takes the model
at the end. It has as many tokens as the run merged; the undisturbed run's loss there lies between two that it measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from diloco_node.chaos.story import loss_at
from diloco_node.learner.builtin.model import ByteGPT
from diloco_node.learner.builtin.trainer import held_out_loss, open_data, settings_from


def compared(run: Path, undisturbed: Path) -> dict[str, Any]:
    """Tokens, both losses in nats per token, and the relative change; None where the other run has no loss there."""
    report, other = (json.loads((folder / "report.json").read_text()) for folder in (run, undisturbed))
    region = run / report["regions"][0]["name"]
    settings = settings_from(json.loads((region / "trainer.json").read_text()))
    windows = open_data(settings).held_out_windows(settings.eval_windows, settings.model.context)
    loss = held_out_loss(ByteGPT(settings.model, seed=settings.seed), windows, load_file(region / "final.safetensors"))
    tokens = report["tokens"]["merged"]
    beside = loss_at(other["training"]["val_losses"], tokens)
    return {
        "tokens": tokens,
        "loss": loss,
        "undisturbed": beside,
        "change": None if beside is None else loss / beside - 1,
    }


def main() -> None:
    """Compare two runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("undisturbed", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    given = parser.parse_args()
    found = compared(given.run, given.undisturbed)
    if given.json:
        print(json.dumps(found))
        return
    change = "no loss there" if found["change"] is None else f"{found['undisturbed']:.4f}: {found['change']:+.2%}"
    print(f"{found['loss']:.4f} at {found['tokens']:,} tokens, undisturbed {change}")


if __name__ == "__main__":
    main()
