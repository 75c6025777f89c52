"""Where `plan` gets its numbers: a size, run.toml, a region's folder, a measured mesh; each with its origin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, Field, ValidationError

from diloco_node.config.units import RATE_BYTES_PER_S_MAX
from diloco_node.core.merge.fragments import VALUES_MAX, Manifest, TensorSpec, build_manifest
from diloco_node.core.types import RunSettings
from diloco_node.errors import ConfigError, StorageError
from diloco_node.learner.builtin.shape import ModelSettings, parameter_shapes
from diloco_node.planning.plan import FragmentSize, Network
from diloco_node.state_names import NODE_NAME

if TYPE_CHECKING:
    from diloco_node.config.resolve import NodeConfig
    from diloco_node.core.types import Direction, RateLimits

_LARGE: Final = {"k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
MESH_BYTES_MAX: Final = 16 * 2**20
MESH_REGIONS_MAX: Final = 64
RTT_S_MAX: Final = 600.0
MESH_SHAPE: Final = (
    '{"regions": ["a", "b"], "pairs": [{"from": "a", "to": "b", "rtt_seconds": 0.04, "bytes_per_second": 250000000}, '
    "...]} with the ordered pairs that were measured"
)


@dataclass(frozen=True, slots=True)
class Source:
    """A model and the settings it is to be trained with.

    origin: "--parameters 5e9", "run.toml (built-in model)", "state/us-east". values: parameters, when only the size is
    known; the fragments are then equal. manifest: the cut of a known model. regions: empty when nobody named them.
    step_time_ns, rtt_ns: as a running region tells them; 0 when unknown. limits: ceilings by region, wire bytes per
    second, the least of the day.
    """

    origin: str
    values: int
    manifest: Manifest | None
    settings: RunSettings
    regions: tuple[str, ...] = ()
    step_time_ns: int = 0
    rtt_ns: int = 0
    limits: Mapping[str, RateLimits] = field(default_factory=dict)

    def ceilings(self, direction: Direction) -> dict[str, int]:
        """Ceilings of regions in a direction; those without a limit are not in it."""
        rates = {region: getattr(limits, direction) for region, limits in self.limits.items()}
        return {region: rate for region, rate in rates.items() if rate is not None}

    def sizes(self, fragments: int) -> tuple[FragmentSize, ...]:
        """The model cut into this many fragments. Raises ConfigError: it can't be cut so fine."""
        from diloco_node.planning.plan import even_sizes, fragment_sizes

        if self.manifest is not None:
            is_cut_so = len(self.manifest.fragments) == fragments
            return fragment_sizes(self.manifest if is_cut_so else build_manifest(self.manifest.tensors, fragments))
        if self.values < fragments:
            raise ConfigError(
                f"{self.values} parameters ({self.origin}) can't be cut into {fragments} fragments: set "
                f"rounds.fragments to {self.values} or less"
            )
        return even_sizes(self.values, fragments)


def parse_parameters(text: str) -> int:
    """`5e9`, `5B`, `350M`, `5_000_000_000`. Raises ConfigError: it is no whole number from 1 to 2^40."""
    unit = _LARGE.get(text[-1:], 1)
    number = text[:-1] if unit != 1 else text
    try:
        exact = Decimal(number) * unit
        if not exact.is_finite() or not 1 <= exact <= VALUES_MAX or exact != int(exact):
            raise ValueError
    except (InvalidOperation, ValueError):
        raise ConfigError(
            f"--parameters {text!r} is no whole number from 1 to {VALUES_MAX}: write 5e9, 5B or 350M"
        ) from None
    return int(exact)


def source_of_size(text: str, config: NodeConfig, path: Path | None) -> Source:
    """A model of which only the size is known; schedule, regions and budget of run.toml."""
    origin = f"--parameters {text}, the rest from {path or 'run.toml'}"
    size, settings = parse_parameters(text), config.run_settings()
    limits = _least_limits(config, config.regions)
    return Source(origin, size, None, settings, tuple(config.regions), limits=limits)


def _least_limits(config: NodeConfig, regions: Iterable[str]) -> dict[str, RateLimits]:
    return {region: config.budget_plan(region).least() for region in regions if region in config.regions}


def source_of_config(config: NodeConfig, path: Path | None) -> Source:
    """The model and the budget of run.toml; the model as a region that ran here knows it, else the built-in trainer's.

    Raises StorageError: a region's manifest is damaged. ConfigError: the model can't be cut into that many fragments.
    """
    from diloco_node.daemon.manifest_file import load_manifest

    name = str(path or "run.toml")
    settings, regions = config.run_settings(), tuple(config.regions)
    limits = _least_limits(config, regions)
    for region in regions:
        manifest = load_manifest(config.state_dir(region))
        if manifest is not None:
            origin = f"{name} and the model in {config.state_dir(region)}"
            return Source(origin, manifest.size, manifest, settings, regions, limits=limits)
    model = config.model
    if model.hf is not None:
        raise ConfigError(
            f"[model] hf in {name} has as many parameters as {model.hf} says, and no region has made the model yet: "
            "give --parameters"
        )
    shapes = parameter_shapes(ModelSettings(model.layers, model.dim, model.heads, model.context))
    manifest = build_manifest([TensorSpec(*shape) for shape in shapes.items()], settings.fragments)
    is_set = any(key[0] == "model" for key in config.origins)
    origin = f"{name}, the built-in model" + ("" if is_set else "; --parameters for one of your own")
    return Source(origin, manifest.size, manifest, settings, regions, limits=limits)


def source_of_state(folder: Path) -> Source:
    """Read a region's folder, and ask its daemon. Raises StorageError: no model was seen yet, or a file is damaged."""
    from diloco_node.cli.admin_client import ask_in
    from diloco_node.config.resolve import load_config
    from diloco_node.daemon.manifest_file import MANIFEST_NAME, load_manifest
    from diloco_node.daemon.run_record import read_run_record
    from diloco_node.daemon.spec import NodeSpec

    spec = NodeSpec.load(folder / NODE_NAME)
    manifest = load_manifest(folder)
    if manifest is None:
        raise StorageError(
            f"{folder} has no {MANIFEST_NAME}: the region's learner has not listed its model yet; "
            "use --parameters until it has"
        )
    # Orders have changed members and settings since the start; the ledger tells, also beside a running daemon.
    record = read_run_record(folder)
    regions = tuple(sorted({spec.region, *spec.peers})) if record is None else record.roster.names
    settings = spec.settings
    if record is not None and record.settings is not None:
        settings = record.settings.within(settings)
    # As run.toml has them now, else of this region as it was started.
    limits = {spec.region: spec.budget.least()}
    if spec.config_file is not None and spec.config_file.exists():
        limits = _least_limits(load_config(spec.config_file), regions)
    document = ask_in(folder)
    step_s = (document.get("learner") or {}).get("step_seconds") or 0.0
    rtts_s = [peer.get("rtt_seconds") or 0.0 for peer in document.get("peers") or []]
    times_ns = int(1e9 * step_s), int(1e9 * max(rtts_s, default=0.0))
    return Source(str(folder), manifest.size, manifest, settings, regions, *times_ns, limits=limits)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Results of `measure mesh`, per ordered pair of regions that could be measured. goodput: payload bytes per second,
    when nothing else was sent."""

    regions: tuple[str, ...]
    rtt_ns: Mapping[tuple[str, str], int]
    goodput: Mapping[tuple[str, str], int]

    def missing(self, regions: Sequence[str]) -> str:
        """Name the pairs of these regions that were not measured; empty if all were."""
        pairs = [(a, b) for a in regions for b in regions if a != b]
        lacking = [pair for pair in pairs if pair not in self.goodput]
        if not lacking:
            return ""
        return f"{len(lacking)} of {len(pairs)} pairs were not measured, the first {lacking[0][0]} to {lacking[0][1]}"

    def network(
        self, regions: Sequence[str], overhead: Fraction, *, egress: Mapping[str, int], ingress: Mapping[str, int]
    ) -> Network:
        """The links between these regions, as wire bytes.

        Pairs are measured one after the other, so what a region sends to all at once is not in the mesh. A region
        without a budget (egress, ingress) is taken to have a line as fast as its best link. A pair that was not
        measured has no limit of its own.

        Raises ConfigError: a region is not in the mesh.
        """
        missing = sorted(set(regions) - set(self.regions))
        if missing:
            raise ConfigError(f"region {missing[0]} is not in the mesh, which has {', '.join(self.regions)}")
        pairs = [(a, b) for a in regions for b in regions if (a, b) in self.goodput]
        wire = {pair: int(self.goodput[pair] * (1 + overhead)) for pair in pairs}
        lines_out = {name: max(wire[pair] for pair in pairs if pair[0] == name) for name in {a for a, _ in pairs}}
        lines_in = {name: max(wire[pair] for pair in pairs if pair[1] == name) for name in {b for _, b in pairs}}
        return Network(
            rtt_ns=max((self.rtt_ns[pair] for pair in pairs), default=0),
            egress=lines_out | dict(egress),
            ingress=lines_in | dict(ingress),
            links=wire,
            is_budgeted=bool(egress or ingress),
        )


class _Pair(BaseModel):
    source: str = Field(alias="from")
    to: str
    rtt_seconds: float = Field(ge=0, le=RTT_S_MAX, strict=True)
    bytes_per_second: float = Field(ge=1, le=RATE_BYTES_PER_S_MAX, strict=True)


class _MeshFile(BaseModel):
    regions: list[str] = Field(min_length=2, max_length=MESH_REGIONS_MAX)
    pairs: list[_Pair] = Field(min_length=1)


def read_mesh(path: Path) -> Mesh:
    """A file as `measure mesh --json` writes it; other keys than the ones named are passed over.

    Raises ConfigError: it can't be read, is not of that shape, or has no pair.
    """
    pairs: dict[tuple[str, str], _Pair] = {}
    try:
        if path.stat().st_size > MESH_BYTES_MAX:
            raise ValueError(f"it has more than {MESH_BYTES_MAX} bytes")
        file = _MeshFile.model_validate_json(path.read_bytes())
        if len(set(file.regions)) != len(file.regions):
            raise ValueError("a region is there twice")
        for entry in file.pairs:
            pair = entry.source, entry.to
            if pair in pairs or entry.source == entry.to or not set(pair) <= set(file.regions):
                raise ValueError(f"pair {pair[0]} to {pair[1]} is there twice, or not of two regions")
            pairs[pair] = entry
    except OSError as error:
        raise ConfigError(
            f"--mesh {path} can't be read ({error.strerror}): `measure mesh --json` writes one"
        ) from error
    except ValueError as error:
        fault = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            fault = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise ConfigError(f"--mesh {path}: {fault}; it must be {MESH_SHAPE}") from error
    rtt_ns = {pair: int(1e9 * entry.rtt_seconds) for pair, entry in pairs.items()}
    goodput = {pair: int(entry.bytes_per_second) for pair, entry in pairs.items()}
    return Mesh(tuple(sorted(file.regions)), rtt_ns, goodput)
