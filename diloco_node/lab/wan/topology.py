"""The topology file: regions, the links between them, and a timetable of outages. Parsing and checks only, no IO.

::

    [wan]
    queue = "50ms"                       # of the rate, at each region's uplink and downlink; then packets are dropped

    [regions.us-east]
    egress = "5Gbit/s"
    ingress = "5Gbit/s"                  # left out: as egress

    [default_link]                       # for pairs that no link names; left out: every pair must be named
    rtt = "60ms"

    [[links]]                            # both directions alike
    between = ["us-east", "us-west"]
    rtt = "62ms"                         # half of it each way
    jitter = "1ms"                       # one way: the delay is spread evenly over delay - jitter .. delay + jitter
    loss = "0.1%"                        # one way, of packets of 1,500 bytes
    rate = "1Gbit/s"                     # of this pair alone, below the regions' own rates

    [[links]]                            # one direction
    from = "us-east"
    to = "us-west"
    delay = "40ms"                       # one way

    [[outages]]                          # times count from the start of the emulation (in a demo: of the training)
    at = "40s"
    for = "20s"
    cut = "us-west"                      # from everyone; direction = "out" or "in" cuts one way only

    [[outages]]                          # between two regions: between = [A, B], or from = A and to = B
    at = "70s"
    for = "10s"
    between = ["us-east", "us-south"]
    loss = "5%"                          # degraded by delay (one way), jitter, loss, rate; with none of them: cut

Rates count IP packets with their headers.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path as FilePath
from typing import Any, Final, TypeVar

from diloco_node.config.units import Duration, Rate, parse_duration, parse_rate
from diloco_node.errors import ConfigError

REGIONS_MAX: Final = 32
LINKS_MAX: Final = REGIONS_MAX * REGIONS_MAX
OUTAGES_MAX: Final = 1000
DELAY_NS_MAX: Final = 10 * 10**9
QUEUE_NS_DEFAULT: Final = 50 * 10**6
PPM: Final = 1_000_000

_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")
PATH_KEYS: Final = ("delay", "jitter", "loss", "rate")
_DIRECTIONS: Final = ("both", "out", "in")

T = TypeVar("T")

Pair = tuple[str, str]
"""(source, destination)."""


@dataclass(frozen=True, slots=True)
class RegionLink:
    """How a region is attached: what it can send and receive, all peers together."""

    name: str
    egress: Rate
    ingress: Rate


@dataclass(frozen=True, slots=True)
class Path:
    """A direction between two regions.

    Attributes:
        delay_ns: one way. jitter_ns: the delay is spread evenly over delay_ns +- jitter_ns; packets stay in order.
        loss_ppm: of packets of at most 1,500 bytes, independent of each other. rate: of this pair alone; None: no
            limit.
    """

    delay_ns: int
    jitter_ns: int = 0
    loss_ppm: int = 0
    rate: Rate | None = None


@dataclass(frozen=True, slots=True)
class PathChange:
    """Changes of a path while it is degraded; None: as it was."""

    delay_ns: int | None = None
    jitter_ns: int | None = None
    loss_ppm: int | None = None
    rate: Rate | None = None

    def apply(self, path: Path) -> Path:
        """The path, degraded."""
        changes = {key: value for key in _FIELDS if (value := getattr(self, key)) is not None}
        return replace(path, **changes)


_FIELDS: Final = ("delay_ns", "jitter_ns", "loss_ppm", "rate")


@dataclass(frozen=True, slots=True, order=True)
class Scope:
    """Paths that a cut or a change concerns.

    Attributes:
        region: one end. other: the other end; "" for all others.
        direction: "both"; "out": only what the region sends; "in": only what it receives.
    """

    region: str
    other: str = ""
    direction: str = "both"

    def pairs(self, names: Sequence[str]) -> tuple[Pair, ...]:
        """The paths, in the order of the names."""
        peers = [name for name in names if name != self.region and self.other in ("", name)]
        out = [(self.region, name) for name in peers] if self.direction != "in" else []
        into = [(name, self.region) for name in peers] if self.direction != "out" else []
        return (*out, *into)

    def __str__(self) -> str:
        """us-east; us-east - us-west; us-east -> us-west."""
        sign = {"both": "-", "out": "->", "in": "<-"}[self.direction]
        if not self.other:
            return self.region if self.direction == "both" else f"{self.region} {sign} all"
        return f"{self.region} {sign} {self.other}"


@dataclass(frozen=True, slots=True)
class Outage:
    """Line of the timetable: from `at_ns` for `for_ns` the scope is cut (`change` None) or degraded."""

    at_ns: int
    for_ns: int
    scope: Scope
    change: PathChange | None = None


@dataclass(frozen=True, slots=True)
class Topology:
    """A whole file, checked.

    Attributes:
        name: of the file or from it. regions: in the file's order. paths: one per ordered pair of different regions.
        queue_ns: length of each queue, as time at its rate. outages: by their start.
    """

    name: str
    regions: tuple[RegionLink, ...]
    paths: Mapping[Pair, Path]
    queue_ns: int = QUEUE_NS_DEFAULT
    outages: tuple[Outage, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The regions, in the file's order."""
        return tuple(region.name for region in self.regions)

    def region(self, name: str) -> RegionLink:
        """A region by name. Raises ConfigError: there is none."""
        for region in self.regions:
            if region.name == name:
                return region
        raise ConfigError(f"region {name!r} is not in topology {self.name}; it has {', '.join(self.names)}")

    def first(self, count: int) -> Topology:
        """The same with its first regions only; outages that name others are left out.

        Raises ConfigError: it has fewer.
        """
        if count > len(self.regions):
            raise ConfigError(f"topology {self.name} has {len(self.regions)} regions, not {count}")
        names = self.names[:count]
        return replace(
            self,
            regions=self.regions[:count],
            paths={pair: path for pair, path in self.paths.items() if pair[0] in names and pair[1] in names},
            outages=tuple(
                outage for outage in self.outages if outage.scope.region in names and outage.scope.other in ("", *names)
            ),
        )


def load_topology(file: FilePath) -> Topology:
    """Read and check a file.

    Raises:
        ConfigError: it can't be read, or something in it is wrong; the message names the place and a value that works.
    """
    try:
        return parse_topology(file.read_text(errors="replace"), name=file.stem)
    except OSError as error:
        raise ConfigError(f"topology {file} can't be read ({error.strerror}); netem/ has some to start from") from error


def parse_topology(text: str, *, name: str) -> Topology:
    """Check the text of a topology file.

    text: TOML. name: what the topology is called in messages, and how its namespaces are called.

    Raises ConfigError: see load_topology.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"topology {name} is no TOML: {error}") from error
    _refuse_unknown(document, {"wan", "regions", "default_link", "links", "outages"}, f"topology {name}")
    reader = _Reader(name, document)
    regions = reader.regions()
    names = tuple(region.name for region in regions)
    return Topology(
        name=name,
        regions=regions,
        paths=reader.paths(names),
        queue_ns=reader.queue_ns(),
        outages=reader.outages(names),
    )


def parse_loss(value: object) -> int:
    """`"0.1%"` in parts per million. Raises ValueError: with a text that completes "SETTING is VALUE: ..."."""
    text = str(value).strip()
    if not isinstance(value, str) or not text.endswith("%"):
        raise ValueError('it must be a share in percent, such as "0.1%"')
    try:
        exact = Decimal(text[:-1].strip()) * (PPM // 100)
    except InvalidOperation:
        raise ValueError('it is no number; write "0.1%"') from None
    if not exact.is_finite() or not 0 <= exact <= PPM:
        raise ValueError("it must lie between 0% and 100%")
    return int(exact)


class _Reader:
    """Turns the tables of one document into checked values; every message says where."""

    def __init__(self, name: str, document: dict[str, Any]) -> None:
        self._name = name
        self._document = document

    def regions(self) -> tuple[RegionLink, ...]:
        tables = self._table("regions")
        if not 2 <= len(tables) <= REGIONS_MAX:
            raise ConfigError(f"topology {self._name} has {len(tables)} regions; it needs 2 to {REGIONS_MAX}")
        regions = []
        for name, entry in tables.items():
            where = f"topology {self._name}, [regions.{name}]"
            if _NAME.fullmatch(name) is None:
                raise ConfigError(f"{where}: a region's name has small letters, digits and dashes, at most 32")
            table = _as_table(entry, where)
            _refuse_unknown(table, {"egress", "ingress"}, where)
            egress = _parse(_required(table, "egress", where, "2Gbit/s"), f"{where} egress", parse_rate)
            ingress = _parse(table["ingress"], f"{where} ingress", parse_rate) if "ingress" in table else egress
            regions.append(RegionLink(name, egress, ingress))
        return tuple(regions)

    def queue_ns(self) -> int:
        table = self._table("wan")
        where = f"topology {self._name}, [wan]"
        _refuse_unknown(table, {"queue"}, where)
        queue_ns = _duration(table["queue"], f"{where} queue") if "queue" in table else QUEUE_NS_DEFAULT
        if not 10**6 <= queue_ns <= DELAY_NS_MAX:
            raise ConfigError(f"{where} queue is {Duration(queue_ns)}: it must lie between 1ms and 10s")
        return queue_ns

    def paths(self, names: tuple[str, ...]) -> dict[Pair, Path]:
        where = f"topology {self._name}, [default_link]"
        default = self._table("default_link")
        _refuse_unknown(default, {"rtt", *PATH_KEYS}, where)
        fallback = _path(default, where) if default else None
        paths: dict[Pair, Path] = {}
        for index, link in enumerate(self._list("links", LINKS_MAX)):
            where = f"topology {self._name}, [[links]] number {index + 1}"
            _refuse_unknown(link, {"between", "from", "to", "rtt", *PATH_KEYS}, where)
            scope = _ends(link, names, where)
            if scope.direction != "both" and "rtt" in link:
                raise ConfigError(f"{where}: one direction has a delay, not an rtt")
            for pair in scope.pairs(names):
                if pair in paths:
                    raise ConfigError(f"{where}: {pair[0]} to {pair[1]} is named twice")
                paths[pair] = _path({**_without_delay(default, link), **link}, where)
        whole: dict[Pair, Path] = {}
        for pair in [(source, target) for source in names for target in names if source != target]:
            path = paths.get(pair, fallback)
            if path is None:
                raise ConfigError(
                    f"topology {self._name} says nothing of {pair[0]} to {pair[1]}: add "
                    f'[[links]] with between = ["{pair[0]}", "{pair[1]}"] and rtt = "40ms", or a [default_link]'
                )
            whole[pair] = path
        return whole

    def outages(self, names: tuple[str, ...]) -> tuple[Outage, ...]:
        outages = []
        for index, table in enumerate(self._list("outages", OUTAGES_MAX)):
            where = f"topology {self._name}, [[outages]] number {index + 1}"
            _refuse_unknown(table, {"at", "for", "cut", "direction", "between", "from", "to", *PATH_KEYS}, where)
            at_ns = _duration(_required(table, "at", where, "40s"), f"{where} at")
            for_ns = _duration(_required(table, "for", where, "20s"), f"{where} for")
            if for_ns == 0:
                raise ConfigError(f"{where}: for is 0s; an outage lasts")
            change = parse_change(table, where)
            if "cut" in table and change is not None:
                raise ConfigError(f"{where}: a cut has no delay, jitter, loss or rate; name two regions by between")
            outages.append(Outage(at_ns, for_ns, _outage_scope(table, names, where), change))
        return tuple(sorted(outages, key=lambda outage: (outage.at_ns, outage.scope)))

    def _table(self, key: str) -> dict[str, Any]:
        return _as_table(self._document.get(key, {}), f"topology {self._name}, [{key}]")

    def _list(self, key: str, most: int) -> list[dict[str, Any]]:
        where = f"topology {self._name}, [[{key}]]"
        entries = self._document.get(key, [])
        if not isinstance(entries, list) or len(entries) > most:
            raise ConfigError(f"{where} must be at most {most} tables, each under [[{key}]]")
        return [_as_table(entry, where) for entry in entries]


def _without_delay(default: dict[str, Any], link: dict[str, Any]) -> dict[str, Any]:
    """Return what a link takes over from the default: not its delay when the link has its own, in whatever form."""
    hidden = {"rtt", "delay"} if "rtt" in link or "delay" in link else set()
    return {key: value for key, value in default.items() if key not in hidden}


def _path(table: dict[str, Any], where: str) -> Path:
    if ("rtt" in table) == ("delay" in table):
        raise ConfigError(f'{where}: give either rtt (there and back) or delay (one way), such as rtt = "40ms"')
    if "rtt" in table:
        delay_ns = _delay(table["rtt"], f"{where} rtt", parts=2)
    else:
        delay_ns = _delay(table["delay"], f"{where} delay")
    change = parse_change({key: table[key] for key in ("jitter", "loss", "rate") if key in table}, where)
    path = (change or PathChange()).apply(Path(delay_ns))
    if path.jitter_ns > delay_ns:
        raise ConfigError(f"{where}: jitter {Duration(path.jitter_ns)} is larger than the delay, {Duration(delay_ns)}")
    return path


def parse_change(table: Mapping[str, Any], where: str) -> PathChange | None:
    """The values that a table has of a path; None: it has none. Raises ConfigError: one is wrong."""
    if not any(key in table for key in PATH_KEYS):
        return None
    return PathChange(
        delay_ns=_delay(table["delay"], f"{where} delay") if "delay" in table else None,
        jitter_ns=_delay(table["jitter"], f"{where} jitter") if "jitter" in table else None,
        loss_ppm=_parse(table["loss"], f"{where} loss", parse_loss) if "loss" in table else None,
        rate=_parse(table["rate"], f"{where} rate", parse_rate) if "rate" in table else None,
    )


def _ends(table: dict[str, Any], names: tuple[str, ...], where: str) -> Scope:
    """The two regions of a link: `between`, or `from` and `to`."""
    is_between = "between" in table
    if is_between == ("from" in table or "to" in table):
        raise ConfigError(f"{where}: name its regions by between = [A, B], or by from = A and to = B")
    if is_between:
        ends, form = table["between"], "between = [A, B]"
    else:
        ends, form = [table.get("from"), table.get("to")], "from = A and to = B"
    if not isinstance(ends, list) or len(ends) != 2 or ends[0] == ends[1]:
        raise ConfigError(f"{where}: {form} needs two different regions")
    for end in ends:
        _check_name(end, names, where)
    return Scope(ends[0], ends[1], "both" if is_between else "out")


def _outage_scope(table: dict[str, Any], names: tuple[str, ...], where: str) -> Scope:
    if "cut" not in table:
        if "direction" in table:
            raise ConfigError(f"{where}: direction goes with cut; between two regions use from and to")
        return _ends(table, names, where)
    if any(key in table for key in ("between", "from", "to")):
        raise ConfigError(f"{where}: give cut = A, or the two ends of a link, not both")
    _check_name(table["cut"], names, where)
    direction = table.get("direction", "both")
    if direction not in _DIRECTIONS:
        raise ConfigError(f'{where}: direction is {direction!r}; use "both", "out" or "in"')
    return Scope(table["cut"], "", direction)


def _check_name(value: object, names: tuple[str, ...], where: str) -> None:
    if value not in names:
        raise ConfigError(f"{where}: region {value!r} is not in the file; it has {', '.join(names)}")


def _as_table(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be a table")
    return value


def _refuse_unknown(table: dict[str, Any], keys: set[str], where: str) -> None:
    unknown = sorted(set(table) - keys)
    if unknown:
        raise ConfigError(f"{where}: {unknown[0]!r} is unknown; it takes {', '.join(sorted(keys))}")


def _required(table: dict[str, Any], key: str, where: str, example: str) -> object:
    if key not in table:
        raise ConfigError(f'{where}: {key} is missing; write {key} = "{example}"')
    value: object = table[key]
    return value


def _duration(value: object, where: str) -> int:
    return _parse(value, where, parse_duration).ns


def _delay(value: object, where: str, *, parts: int = 1) -> int:
    delay_ns = _duration(value, where) // parts
    if delay_ns > DELAY_NS_MAX:
        raise ConfigError(f"{where} is {value!r}: a delay of {Duration(delay_ns)} is longer than 10s")
    return delay_ns


def _parse(value: object, where: str, parse: Callable[[object], T]) -> T:
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"{where} is {value!r}: {error}") from None
