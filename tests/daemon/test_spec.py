"""The daemon's specification: what was saved is what is loaded, field by field."""

import dataclasses
import json
from pathlib import Path

import pytest

from diloco_node.core.types import CarryMode, Codec, MergeRule, RunSettings
from diloco_node.daemon.spec import NodeSpec
from diloco_node.errors import ConfigError


def other_than_default(settings: RunSettings) -> RunSettings:
    """Every field another value than the default's, of the same type."""
    changes: dict[str, object] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, bool):
            changes[field.name] = not value
        elif isinstance(value, (Codec, MergeRule, CarryMode)):
            changes[field.name] = next(choice for choice in type(value) if choice is not value)
        else:
            changes[field.name] = value + 1
    return RunSettings(**changes)  # type: ignore[arg-type]


SPEC = NodeSpec(
    region="us",
    run_id="run1",
    regions=("eu", "us"),
    listen_host="0.0.0.0",
    listen_port=7001,
    peers={"eu": "eu.example:7001", "ap": None},
    address=None,
    state_dir=Path("/state/us"),
    identity_dir=Path("/certs/us"),
    admin_port=0,
    learner_socket=Path("/state/us/learner.sock"),
    supervisor_socket=Path("/state/us/memory.sock"),
    settings=other_than_default(RunSettings()),
    settings_digest="ab" * 32,
    init="/models/start.safetensors",
    seed=7,
)


@pytest.mark.parametrize("spec", [SPEC, dataclasses.replace(SPEC, init=None, settings=RunSettings())])
def test_a_restart_reads_what_was_written(tmp_path: Path, spec: NodeSpec) -> None:
    spec.save(tmp_path / "node.json")
    again = NodeSpec.load(tmp_path / "node.json")
    assert again == spec
    for field in dataclasses.fields(spec):
        assert type(getattr(again, field.name)) is type(getattr(spec, field.name)), field.name
    for field in dataclasses.fields(spec.settings):
        assert type(getattr(again.settings, field.name)) is type(getattr(spec.settings, field.name)), field.name


@pytest.mark.parametrize("damage", ["missing", "empty", "list", "field", "codec", "extra"])
def test_what_is_no_specification_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "node.json"
    SPEC.save(path)
    document = json.loads(path.read_text())
    if damage == "missing":
        path.unlink()
    elif damage == "field":
        del document["state_dir"]
    elif damage == "codec":
        document["settings"]["codec_up"] = "int3"
    elif damage == "extra":
        document["surprise"] = 1
    if damage in ("empty", "list"):
        path.write_text("" if damage == "empty" else "[]")
    elif damage != "missing":
        path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"node\.json is not a node specification"):
        NodeSpec.load(path)
