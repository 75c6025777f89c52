"""The options of a demo, as the user gave them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

SECONDS_DEFAULT: Final = 90.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of `diloco-node demo`.

    Attributes:
        regions: how many; None: as many as the WAN's file has, else 4.
        seconds: training time. tokens: to be merged, instead of a time; 0: the time ends it.
        folder: where to keep everything; None: a new one.
        data: files or folders of text. is_json: one JSON object on standard output, nothing else there.
        seed: of the run.
        wan: a topology file to run in; None: plain loopback. wan_backend: "auto", or one of `wan.emulation.BACKENDS`.
        has_outage: cut one region off for a fifth of the time, in the middle; needs a WAN.
        budget: what each region may send, and receive, such as "20Mbit/s"; "": no limit.
        has_chaos: processes are killed while it trains. mtbf: mean time between two kills, such as "2s"; "": 5 s.
        victims: what is killed, with commas; "": everything there is. tape: a file of faults instead of drawn ones.
        baseline: report of an undisturbed demo to compare with.
        speeds, batches, ranks, shards: of the learners, with commas, in the order of the regions' names; "": all the
            same, of one rank.
    """

    regions: int | None = None
    seconds: float = SECONDS_DEFAULT
    tokens: int = 0
    folder: Path | None = None
    data: tuple[str, ...] = ()
    is_json: bool = False
    seed: int = 0
    wan: Path | None = None
    wan_backend: str = "auto"
    has_outage: bool = False
    budget: str = ""
    has_chaos: bool = False
    mtbf: str = ""
    victims: str = ""
    tape: Path | None = None
    baseline: Path | None = None
    speeds: str = ""
    batches: str = ""
    ranks: str = ""
    shards: str = ""
