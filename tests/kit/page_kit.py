"""Status documents of a made-up run, as daemons make them, for the page: healthy, or with one region lost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from diloco_node.daemon.admin.admin_server import AdminServer
from diloco_node.daemon.run_history import COLUMNS

UNIX = 1_790_000_000.0
NAMES = ("eu-west", "us-east", "us-west")
FRAGMENTS = 4
LOST = "us-west"
HOSTILE = "<img src=x onerror=console.error('escaped')></script>"


def note(at: int, kind: str, text: str, *, is_alarm: bool = False, fragment: int = -1) -> dict[str, Any]:
    return {
        "at_ns": at * 10**9,
        "kind": kind,
        "text": text,
        "fragment": fragment,
        "version": -1 if fragment < 0 else at // FRAGMENTS,
        "is_alarm": is_alarm,
        "count": 1 + at % 2,
    }


MARKED = {
    5: ("leader", "us-east leads term 3"),
    21: ("peer", f"{LOST} is gone"),
    29: ("peer", f"{LOST} is here"),
    41: ("learner", "incarnation 2 attached at step 40"),
}
"""Notes that are marks on the curves, by the second modulo 64."""
LETTERS = {5: "L", 21: "P", 29: "P", 41: "R"}


def note_at(number: int) -> dict[str, Any]:
    kind, text = MARKED.get(number % 64, ("waits" if number % 9 else "digest", f"note {number}"))
    return note(number, kind, text, is_alarm=kind == "digest", fragment=number % FRAGMENTS if kind == "waits" else -1)


def round_row(at: int, *, has_lost: bool) -> dict[str, Any]:
    """A round that ended at second `at`; each eleventh fails."""
    is_failed = at % 11 == 0
    phases = {"gather": 0.2 + 0.03 * (at % 5), "reduce": 0.1, "commit": 0.05, "apply": 0.02}
    return {
        "fragment": at % FRAGMENTS,
        "version": at // FRAGMENTS,
        "ended_unix": UNIX + at,
        "outcome": "failed" if is_failed else "committed",
        "seconds": sum(phases.values()) * (4 if is_failed else 1),
        "phases": phases,
        "members": [name for name in NAMES if name != LOST or not has_lost],
        "missing": [LOST] if has_lost else [],
        "waited_for": {"region": LOST, "phase": "gather"} if has_lost else None,
        "reason": f"its contribution did not come {HOSTILE}" if has_lost else "",
    }


ALERT = {
    "severity": "critical",
    "code": "A-PEER-DOWN",
    "region": LOST,
    "text": f"{LOST} has not been heard for SECONDS: connection refused",
    "hint": "Its machine, its daemon, or the way there is down. The others go on without it.",
    "command": f"diloco-node doctor --peer {LOST}",
}
WARNING = {
    "severity": "warning",
    "code": "A-BUDGET-SMALL",
    "region": "us-east",
    "text": "the budget is 82 % used: rounds come later than they could",
    "hint": "Raise egress to 25 Mbit/s, or sync_every to 32.",
    "command": "diloco-node budget set us-east --egress 25Mbit/s",
}


def health(at: int, *, has_lost: bool) -> dict[str, Any]:
    return {
        "state": "degraded" if has_lost else "healthy",
        "line": f"{LOST} is down; the other two go on" if has_lost else "all 3 regions merge",
        "since_unix": UNIX + at - 125,
        "failure_tolerance": 0 if has_lost else 1,
        "training_tolerance": 2 - has_lost,
        "alerts": [{**ALERT, "text": ALERT["text"].replace("SECONDS", f"{at} s")}, WARNING] if has_lost else [],
    }


def peer_row(name: str, *, is_up: bool) -> dict[str, Any]:
    return {
        "name": name,
        "link": "up" if is_up else "dialling",
        "address": "10.0.0.1:7400",
        "error": "" if is_up else "Connection refused",
        "bulk_connections": 2,
        "is_alive": is_up,
        "rtt_seconds": 0.042 if is_up else None,
        "hears": [],
        "step": 100,
        "applied_index": 40,
        "wire_bytes_out": 10,
        "wire_bytes_in": 20,
        "is_measured": True,
    }


def peer_budget(at: int) -> dict[str, Any]:
    lanes = {"control": 3_000, "rounds": 90_000, "recovery": 0, "measurement": 0}
    return {
        "egress_bytes_per_s": 1_250_000,
        "limited_by": "grant",
        "granted_bytes_per_s": 1_250_000,
        "overhead": 1.06,
        "correction_bytes": 10,
        "lanes": {lane: {"wanted_bytes": at * rate, "used_bytes": at * rate} for lane, rate in lanes.items()},
    }


def learner_row(at: int, offset: float) -> dict[str, Any]:
    return {
        "step": at,
        "tokens": at * 512,
        "current_tokens_per_second": 4_500.0 + 100 * offset + at % 7 * 10,
        "tokens_per_second": 4_400.0,
        "loss": 6.0 / (1 + at / 300) + offset + (at % 5) / 50,
        "val_loss": 6.0 / (1 + at // 64 * 64 / 300) + offset,
        "val_loss_global": 6.0 / (1 + at // 64 * 64 / 300) - 0.1,
        "report_age_seconds": 0.2,
    }


def status(at: int, region: str = "us-east", *, has_lost: bool = False) -> dict[str, Any]:
    """The document at a second of the run."""
    peers = [name for name in NAMES if name != region]
    version = at // FRAGMENTS
    return {
        "region": region,
        "run_id": "shown",
        "state": "training",
        "role": "leader" if region == "us-east" else "follower",
        "leader": "us-east",
        "commit_index": at,
        "applied_index": at,
        "last_index": at + 1,
        "reason": f"fragment {at % FRAGMENTS}: waits for contributions of {LOST}" if has_lost else "no fragment is due",
        "versions": [
            version - (number >= at % FRAGMENTS) - 2 * (has_lost and region == LOST) for number in range(FRAGMENTS)
        ],
        "rounds_committed": at,
        "tokens_merged": at * 1_400,
        "participation": 0.97,
        "participation_of": dict.fromkeys(NAMES, 0.97),
        "rounds": [{"fragment": at % FRAGMENTS, "version": version + 1, "open_seconds": 0.4, "reason": "waits"}],
        "peers": [peer_row(name, is_up=not (has_lost and name == LOST)) for name in peers],
        "members": {
            "tolerance": "2 voters, 2 must be there: the next failure stops merging; training goes on in each region",
            "rows": [
                {
                    "region": name,
                    "kind": "contributor" if name == LOST else "voter",
                    "since": 1 + 30 * (name == LOST),
                    "since_unix": UNIX if name == LOST else None,
                    "has_folder": not (has_lost and name == LOST),
                    "state": "away, waits for a link with its certificate" if has_lost and name == LOST else "there",
                }
                for name in NAMES
            ],
        },
        "budget": {
            "egress_bytes_per_s": 2_500_000,
            "ingress_bytes_per_s": 2_500_000,
            "share_used": 0.41,
            "peers": {name: peer_budget(at) for name in peers},
        },
        "budget_warning": "",
        "wire_bytes_out": at * 186_000,
        "wire_bytes_in": at * 190_000,
        "learner": learner_row(at, NAMES.index(region) / 5),
        "learner_process": {"state": "running"},
        "tokens": at * 512,
        "token_account": {"trained": at * 512, "carried": 1_024, "run_merged": at * 1_400, "run_discarded": 512},
        "notes": [note_at(number) for number in range(max(0, at - 64), at)],
        "marks": [[number * 10**9, LETTERS[number % 64]] for number in range(at - 64, at) if number % 64 in LETTERS],
        "clock": {"unix": UNIX + at, "monotonic_ns": at * 10**9},
        "manifest_digest": "8a5a7d8703b2",
        "parameters": 133_000,
        "health": health(at, has_lost=has_lost),
        "run": {
            "id": "shown",
            "step": at,
            "total_steps": 10_000,
            "tokens": at * 1_500,
            "tokens_total": None,
            "eta_seconds": 3_700.0,
        },
        "round_log": [round_row(number, has_lost=has_lost) for number in range(max(0, at - 128), at)],
    }


def history(until: int, region: str = "us-east", *, period: int = 8) -> dict[str, Any]:
    rows = []
    for at in range(0, until, period):
        learner = learner_row(at, NAMES.index(region) / 5)
        keys = ("step", "tokens", "loss", "val_loss_global", "current_tokens_per_second")
        rows.append([UNIX + at, *(learner[key] for key in keys), at * 186_000, at * 190_000, learner["val_loss"]])
    marks = [[UNIX + number, LETTERS[number % 64]] for number in range(until) if number % 64 in LETTERS]
    return {"columns": list(COLUMNS), "period_s": float(period), "rows": rows, "marks": marks}


SETTINGS = [
    ["run.id", '"shown"', "/etc/diloco/run.toml:2"],
    ["rounds.sync_every", "16", "/etc/diloco/run.toml:9"],
    ["rounds.grace_gamma", "0.5", "default"],
]


def snapshot(at: int, region: str = "us-east", *, has_lost: bool = False) -> dict[str, Any]:
    """The answer of a region's `/api/v1/snapshot`."""
    document = status(at, region, has_lost=has_lost)
    return {"status": document, "history": history(at, region), "settings": SETTINGS}


class ShownRun:
    """A run whose seconds pass with every status that is asked for.

    Attributes:
        at: the second. region: whose document it is. has_lost: whether a region is lost now.
        asked: how often a status was made.
    """

    def __init__(self, at: int = 1_200, region: str = "us-east") -> None:
        self.at = at
        self.region = region
        self.has_lost = False
        self.asked = 0

    def status(self) -> dict[str, Any]:
        self.at += 1
        self.asked += 1
        return status(self.at, self.region, has_lost=self.has_lost)

    def snapshot(self) -> dict[str, Any]:
        return snapshot(self.at, self.region, has_lost=self.has_lost)

    def handlers(self) -> Any:
        async def measure(*_: Any) -> dict[str, Any]:
            await asyncio.sleep(0)
            return {}

        return SimpleNamespace(
            status=self.status,
            snapshot=self.snapshot,
            not_ready_reason=lambda: "",
            running_node=None,
            drain=lambda: None,
            set_budget=lambda _: {},
            measure=measure,
            expel=None,
            revoke=None,
            lift_quarantine=lambda _: False,
            start_learner=lambda: "waiting",
        )


@contextlib.asynccontextmanager
async def shown(run: ShownRun, folder: Path, *, port: int = 0) -> AsyncIterator[str]:
    """The real admin port of a made-up run; its address."""
    server = AdminServer(run.handlers(), CollectorRegistry(), port=port, state_dir=folder)
    await server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def crowded(port: int, count: int) -> AsyncIterator[None]:
    """As many connections as a port has room for; each one beyond that is closed, however many come."""
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _ in range(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 120) == b""
        writer.close()
    yield
    for _, writer in connections:
        writer.close()
