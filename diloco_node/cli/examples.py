"""Examples for each command, shown at the end of its `--help`. Tests parse every one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import typer
from typer.models import CommandInfo

EXAMPLES: Final = {
    "init": "diloco-node init --regions us-east=203.0.113.10:7400,eu-west --script train.py --yes",
    "start": "diloco-node start --region us-east -- torchrun --nproc-per-node 8 train.py",
    "demo": "diloco-node demo --regions 3 --seconds 30",
    "status": "diloco-node status state/us-east --watch",
    "why": "diloco-node why us-east",
    "dashboard": "diloco-node dashboard state --port 7500",
    "report": "diloco-node report state --out report.html",
    "drain": "diloco-node drain us-east",
    "finish": 'diloco-node finish us-east --reason "the loss is flat"',
    "doctor": "diloco-node doctor --region us-east -- python train.py",
    "help": "diloco-node help E-PEER-CERT",
    "plan": (
        "diloco-node plan --parameters 5e9 --regions 4 --step-time 1s --budget 2Gbit/s\n"
        "diloco-node plan --config run.toml --mesh mesh.json\n"
        "diloco-node plan us-east --budget 500Mbit/s"
    ),
    "ledger": "diloco-node ledger us-east --follow --from 1000",
    "replay": "diloco-node replay us-east --json",
    "checkpoint list": "diloco-node checkpoint list us-east",
    "checkpoint verify": "diloco-node checkpoint verify s3://bucket/my-run",
    "checkpoint copy": "diloco-node checkpoint copy us-east s3://bucket/my-run",
    "export": "diloco-node export us-east exported",
    "budget show": "diloco-node budget show us-east",
    "budget set": "diloco-node budget set us-east --egress 2Gbit/s --ingress none",
    "quarantine add": "diloco-node quarantine add us-west us-east",
    "quarantine lift": "diloco-node quarantine lift us-west us-east",
    "members list": "diloco-node members list us-east",
    "members add": "diloco-node members add ap-south us-east --address 192.0.2.7:7400 --ca-key /media/stick/ca.key",
    "members recover": "diloco-node members recover us-east --ca-key /media/stick/ca.key",
    "members remove": "diloco-node members remove us-west us-east --ca-key /media/stick/ca.key",
    "members witness": "diloco-node members witness s3://bucket/my-run us-east --ca-key /media/stick/ca.key",
    "members promote": "diloco-node members promote us-west us-east",
    "members demote": "diloco-node members demote us-west us-east",
    "learner start": "diloco-node learner start us-east",
    "certs init": "diloco-node certs init us-east us-west eu-west --run-id my-run --out certs",
    "certs add": "diloco-node certs add asia --out certs",
    "certs renew": "diloco-node certs renew us-west",
    "certs revoke": "diloco-node certs revoke us-west us-east",
    "config show": "diloco-node config show --origin --set rounds.sync_every=16",
    "config set": "diloco-node config set rounds.sync_every=32 rounds.overlap_steps=4 us-east",
    "simulate run": "diloco-node simulate run --seed 7",
    "simulate hunt": "diloco-node simulate hunt --seeds 1..1000 --jobs 8",
    "wan up": "diloco-node wan up netem/us-4.toml",
    "wan down": "diloco-node wan down",
    "wan cut": "diloco-node wan cut us-west --from us-east --one-way out",
    "wan heal": "diloco-node wan heal us-west",
    "wan set": "diloco-node wan set us-west --delay 80ms --loss 1%",
    "wan status": "diloco-node wan status",
    "chaos strike": "diloco-node chaos strike pause us-east.daemon --for 10s --folder runs/demo",
    "measure serve": "diloco-node measure serve --region us-west",
    "measure latency": "diloco-node measure latency us-west --load",
    "measure bandwidth": "diloco-node measure bandwidth us-west --reverse --seconds 10",
    "measure mesh": "diloco-node measure mesh --out mesh.json\ndiloco-node plan --mesh mesh.json",
}


def commands_of(app: typer.Typer, above: tuple[str, ...] = ()) -> Iterator[tuple[str, CommandInfo]]:
    """All commands below an application, by their words."""
    for info in app.registered_commands:
        name = info.name or getattr(info.callback, "__name__", "").replace("_", "-")
        yield " ".join((*above, name)), info
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from commands_of(group.typer_instance, (*above, str(group.name)))


def add_examples(app: typer.Typer) -> None:
    """Let the help of each command end with its example."""
    for words, info in commands_of(app):
        if words in EXAMPLES:
            lines = EXAMPLES[words].replace("\n", "\n  ")
            info.epilog = f"\b\nExample:\n  {lines}"
