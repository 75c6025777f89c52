"""`diloco-node export`: the merged model as a folder that `from_pretrained` loads, also in mid-run."""

from __future__ import annotations

import json
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from diloco_node import __version__
from diloco_node.cli.places import CopiesArgument, copies_or_run
from diloco_node.errors import ConfigError, StorageError
from diloco_node.integrations.weight_files import check_hub_name, has_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from diloco_node.daemon.export_source import MergedModel
    from diloco_node.integrations.model_export import SavedModel
    from diloco_node.storage.object_store import Objects

REPORT_NAME: Final = "export.json"
BEGUN_NAME: Final = "export-begun.json"
"""At a URL while the files of an export are sent: --force may replace what a cut has left."""

LISTING_BYTES_MAX: Final = 64 << 20
CONFIG_NAME: Final = "config.json"
NAMES_SHOWN: Final = 3
PLAIN: Final = "plain tensors and config.json: transformers is not installed, or does not know the model"
UNKNOWN: Final = (
    "model.safetensors alone: the config.json of a training script's own model is not known here. For from_pretrained "
    "add --config FILE, or --base FOLDER; else model.load_state_dict(..., strict=False) takes the tensors"
)


class ExportType(StrEnum):
    """Type of the tensors in the folder."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class ExportForm(StrEnum):
    """Files of the folder."""

    HF = "hf"
    DCP = "dcp"


def export(
    *,
    place: CopiesArgument,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write, or a URL such as s3://BUCKET/NAME.")],
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The model's config.json, where a script of your own trains it."),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base", metavar="FOLDER", help="A saved model: config, tokenizer and what is not merged come from it."
        ),
    ] = None,
    form: Annotated[
        ExportForm, typer.Option("--format", help="For `from_pretrained`, or for torch.distributed.checkpoint.")
    ] = ExportForm.HF,
    dtype: Annotated[ExportType, typer.Option("--dtype", help="Type of the tensors.")] = ExportType.FLOAT32,
    version: Annotated[
        int | None,
        typer.Option("--version", metavar="N", min=0, help="As the run was when all fragments had N merges."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=0, help="The newest version up to this step of the run.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export in OUT.")] = False,
) -> None:
    """Write the merged model as a folder: final, newest on disk, or an earlier version; of copies the newest one.

    Nothing in the region's folder is changed, and a daemon may run on it.
    """
    from diloco_node.core.merge.adapter_names import has_adapters
    from diloco_node.integrations.model_export import save_adapter, save_dcp, save_model

    model = _read_model(place, version, step)
    is_dcp, is_adapter = form is ExportForm.DCP, has_adapters(model.tensors)
    if is_dcp and (config or base) is not None:
        raise ConfigError("--config and --base are for --format hf: a distributed checkpoint has tensors only")
    document, source = ({}, None) if is_adapter or is_dcp else _model_source(model, config, base)
    weights = source if source is not None and (base is not None or has_weights(source)) else None
    with _new_export(out, is_forced=force) as fresh:
        if is_dcp:
            result = save_dcp(fresh, model.tensors, dtype=dtype.value)
        elif is_adapter:
            result = save_adapter(fresh, model.tensors, config or base, dtype=dtype.value)
        else:
            result = save_model(fresh, model.tensors, document, base=weights, tokenizer=source, dtype=dtype.value)
        report = as_document(model, result, _file_digests(fresh))
        (fresh / REPORT_NAME).write_text(json.dumps(report, indent=2) + "\n")
    typer.echo(report_line(report, out))
    if result.is_plain:
        typer.echo(PLAIN if document else UNKNOWN)
    if result.random:
        names = ", ".join(result.random[:NAMES_SHOWN]) + (", ..." if len(result.random) > NAMES_SHOWN else "")
        typer.echo(f"{names}: not in the run, so they are random. Give --base, what save_pretrained wrote", err=True)
        raise typer.Exit(1)


def _read_model(place: str, version: int | None, step: int | None) -> MergedModel:
    from diloco_node.daemon.checkpoint_copies import copies_at
    from diloco_node.daemon.export_source import read_merged, read_merged_past
    from diloco_node.daemon.run_files import region_folders

    if version is not None and step is not None:
        raise ConfigError("--version and --step both name an earlier model: give one of them")
    source = copies_or_run(place)
    if version is None and step is None and copies_at(source) is None:
        return read_merged(region_folders(Path(source))[0])
    return read_merged_past(source, version=version, step=step)


@contextmanager
def _new_export(out: str, *, is_forced: bool) -> Iterator[Path]:
    """Hand out an empty folder to fill, which takes the name at the end of the block, or is sent to the URL.

    Raises ConfigError: something is there that is no export: --force on a wrong path would remove a region's state.
    """
    import numpy as np

    from diloco_node.storage.durable import new_folder
    from diloco_node.storage.object_store import folder_of, open_objects

    folder = folder_of(out)
    if folder is None:
        objects = open_objects(out)
        names = set(objects.sizes())
    else:
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names and is_forced and not names & {REPORT_NAME, BEGUN_NAME}:
        raise ConfigError(f"{out} has no {REPORT_NAME}: --force replaces earlier exports only; give another name")
    if folder is not None:
        with new_folder(folder, is_forced=is_forced) as fresh:
            yield fresh
        return
    if names and not is_forced:
        raise ConfigError(f"{out} is there and not empty: give another URL, or add --force to replace it")
    with TemporaryDirectory(prefix="diloco-export-") as fresh_name:
        yield Path(fresh_name)
        paths = {path.relative_to(fresh_name).as_posix(): path for path in _files(Path(fresh_name))}
        # Others' objects below the URL stay. Of one that was cut off, this list says what it replaced and wrote.
        earlier = {name for report in names & {REPORT_NAME, BEGUN_NAME} for name in _listing(objects, report)} & names
        objects.write(BEGUN_NAME, [json.dumps({"files": sorted(earlier | paths.keys())}).encode()])
        for name in sorted((names & {REPORT_NAME}) | (earlier - paths.keys()), key=lambda name: name != REPORT_NAME):
            objects.remove(name)
        # The report comes last: without it the files at the URL are no export.
        for name in sorted(paths, key=lambda name: name == REPORT_NAME):
            objects.write(name, [np.memmap(paths[name], np.uint8, "r").data] if paths[name].stat().st_size else [])
        objects.remove(BEGUN_NAME)


def _listing(objects: Objects, name: str) -> list[str]:
    """The files that an earlier export names; none where its list is damaged."""
    try:
        return [str(file) for file in json.loads(objects.read(name, LISTING_BYTES_MAX).tobytes())["files"]]
    except (StorageError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _file_digests(folder: Path) -> dict[str, dict[str, Any]]:
    from blake3 import blake3

    return {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "blake3": blake3(max_threads=1).update_mmap(path).hexdigest(),
        }
        for path in _files(folder)
    }


def _model_source(model: MergedModel, config: Path | None, base: Path | None) -> tuple[dict[str, Any], str | None]:
    """The model's config, and the folder or name of the model that it began with, if there is one; empty: a script's
    own model."""
    from diloco_node.learner.builtin.shape import ModelSettings, hf_config, parameter_shapes

    trainer = model.trainer
    name = trainer.get("hf")
    source = str(base) if base is not None else name
    if config is not None or base is not None:
        return read_config(config or base or Path()), source
    if name:
        check_hub_name(name)
        # The recipe trains a causal language model, whatever head the folder was saved with.
        config_values = read_config(Path(name)) if Path(name).is_dir() else _hub_config(name)
        return {key: value for key, value in config_values.items() if key != "architectures"}, source
    shape = ModelSettings(**{field: value for field, value in trainer.items() if field != "hf"})
    if trainer and {spec.name: spec.shape for spec in model.manifest.tensors} == parameter_shapes(shape):
        return hf_config(shape), None
    return {}, None


def _hub_config(name: str) -> dict[str, Any]:
    try:
        from transformers import PretrainedConfig

        return dict(PretrainedConfig.get_config_dict(name)[0])
    except (ImportError, OSError) as error:
        raise ConfigError(f"the config of {name} is not here ({type(error).__name__}): add --config") from error


def read_config(path: Path) -> dict[str, Any]:
    """A config.json, or that of a folder. Raises ConfigError: it is none."""
    from diloco_node.daemon.export_source import read_object

    config = read_object(path / CONFIG_NAME if path.is_dir() else path)
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{path} has no model_type: give the config.json that save_pretrained writes")
    return config


def as_document(model: MergedModel, result: SavedModel, files: Mapping[str, Any]) -> dict[str, Any]:
    """export.json; docs/export.md describes its fields."""
    return {
        "diloco_node": __version__,
        "run_id": model.run_id,
        "region": model.region,
        "is_final": model.is_final,
        "version": None if model.past is None else model.past.number,
        "step": None if model.past is None else model.past.step,
        "versions": list(model.versions),
        "tokens": model.tokens,
        "manifest_digest": model.manifest.digest,
        "merged": len(model.tensors),
        "kept": list(result.unmerged),
        "files": files,
    }


def report_line(report: Mapping[str, Any], out: str) -> str:
    """For people: the contents of the folder."""
    versions = report["versions"]
    state = "finished" if report["is_final"] else "in mid-run"
    if report["version"] is not None:
        state = f"version {report['version']}, step {report['step']:,}"
    span = f", versions {min(versions)} to {max(versions)}" if versions else ""
    tokens = "" if report["tokens"] is None else f", {report['tokens']:,} tokens"
    unmerged_text = f", {len(report['kept'])} tensors that are not merged" if report["kept"] else ""
    return f"{out}: run {report['run_id']} ({state}{span}{tokens}), {report['merged']} merged tensors{unmerged_text}"
