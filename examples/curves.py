"""Hand a region's run history on to TensorBoard, Trackio or Weights & Biases, beside `diloco-node start`.

    python curves.py STATE-FOLDER tensorboard|trackio|wandb

It follows `history.jsonl` until Ctrl-C. The x axis is the region's tokens; a run is a group, a region a line in it.
`curves.json` in the folder says how far it came, so another start repeats nothing.
"""

import importlib
import json
import sys
import time
from pathlib import Path

folder, library = Path(sys.argv[1]), sys.argv[2]
spec = json.loads((folder / "node.json").read_text())
run, region = spec["run_id"], spec["region"]

if library == "tensorboard":
    writer = importlib.import_module("tensorboard.summary").Writer(str(folder / "tensorboard" / run / region))

    def log(values: dict[str, float], tokens: int, unix: float) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, tokens, wall_time=unix)
        writer.flush()

else:
    tracker = importlib.import_module(library).init(project=run, name=region, group=run, resume="allow")

    def log(values: dict[str, float], tokens: int, unix: float) -> None:
        tracker.log({**values, "tokens": tokens, "unix": unix}, step=tokens)


position = folder / "curves.json"
until = json.loads(position.read_text()) if position.exists() else 0.0
while True:
    history = folder / "history.jsonl"
    # The last line has no end while it is written.
    lines = history.read_text().split("\n")[:-1] if history.exists() else []
    for row in map(json.loads, lines):
        unix, tokens = row.pop("unix", 0.0), row.pop("tokens", None)
        if unix > until and tokens is not None:
            log(row, tokens, unix)
            until = unix
    position.write_text(json.dumps(until))
    time.sleep(2.0)
