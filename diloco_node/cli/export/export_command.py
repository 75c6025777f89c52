"""`diloco-node export`: the merged model as a folder that `from_pretrained` loads, also in mid-run."""

from __future__ import annotations

import importlib.util
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from diloco_node import __version__
from diloco_node.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco_node.cli.export.parts import JoinedTensors
    from diloco_node.daemon.export_source import MergedModel
    from diloco_node.learner.builtin.hf_settings import HfModelSettings
    from diloco_node.learner.builtin.shape import ModelSettings
    from diloco_node.storage.model_files import StoredTensor

REPORT_NAME: Final = "export.json"


class ExportType(StrEnum):
    """Of the merged tensors in the folder."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def export(
    *,
    place: Annotated[
        Path, typer.Argument(metavar="RUN|STATE_DIR", help="The folder of all regions' state, or of one region.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The model's config.json; the built-in one is known."),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base", metavar="FOLDER|FILE", help="A saved model: frozen parameters and buffers come from it."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="FOLDER|FILE", help="Its files are copied into OUT.")
    ] = None,
    strip: Annotated[str, typer.Option("--strip", metavar="PREFIX", help="Taken off the tensors' names.")] = "",
    dtype: Annotated[ExportType, typer.Option("--dtype", help="Of the merged tensors.")] = ExportType.FLOAT32,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Load OUT with transformers, where that is installed.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export in OUT.")] = False,
) -> None:
    """Write the merged model as a folder for `from_pretrained`: final, or in mid-run the newest one on disk.

    Nothing in the region's folder is changed, and a daemon may run on it.
    """
    from diloco_node.cli.export import parts
    from diloco_node.daemon.export_source import read_merged, region_folder
    from diloco_node.storage.model_files import CONFIG_NAME, write_model_folder

    _check_out(out, is_forced=force)
    folder = region_folder(place)
    merged = read_merged(folder)
    model = parts.trained_model(folder, merged.manifest)
    base = base or _own_base(model)
    document = _config(config, base, model)
    tensors = parts.stripped(merged.tensors, strip) if strip else merged.tensors
    if base is not None:
        ties = bool(document.get("tie_word_embeddings"))
        joined = parts.joined(tensors, _base_tensors(base, tensors), ties_embeddings=ties, dtype=dtype.value)
    else:
        joined = parts.unjoined(tensors, _remade(model, folder, merged), dtype=dtype.value)
    files, copies = _tokenizer(tokenizer, base, model, folder)
    report = as_document(merged, joined)
    files |= {CONFIG_NAME: parts.with_dtype(document, dtype.value), REPORT_NAME: report}
    write_model_folder(out, joined.tensors, files, copies, is_forced=force)
    for line in report_lines(report, out):
        typer.echo(line)
    if check and not _loads(out):
        raise typer.Exit(1)


def _check_out(out: Path, *, is_forced: bool) -> None:
    """Refuse to replace a folder that is no export: --force on a wrong path would remove a region's state."""
    is_used = out.is_dir() and any(out.iterdir())
    if is_used and is_forced and not (out / REPORT_NAME).is_file():
        raise ConfigError(f"{out} has no {REPORT_NAME}: --force replaces earlier exports only; name another folder")


def _own_base(model: ModelSettings | HfModelSettings | None) -> Path | None:
    """The folder whose weights the built-in trainer began with; none of its tensors is lacking there."""
    from diloco_node.learner.builtin.hf_settings import HfModelSettings

    return model.folder if isinstance(model, HfModelSettings) and model.init == "weights" else None


def _config(given: Path | None, base: Path | None, model: ModelSettings | HfModelSettings | None) -> dict[str, Any]:
    from diloco_node.cli.export.parts import model_config
    from diloco_node.learner.builtin.hf_settings import HfModelSettings
    from diloco_node.learner.builtin.shape import hf_config

    if given is not None:
        return model_config(given)
    if base is not None and base.is_dir():
        return model_config(base)
    if isinstance(model, HfModelSettings):
        return model_config(model.config_file)
    if model is not None:
        return hf_config(model)
    raise ConfigError(
        "a training script of your own trains this model, so its config.json is not known here: add --config FILE, or "
        "--base FOLDER with what model.save_pretrained wrote"
    )


def _remade(
    model: ModelSettings | HfModelSettings | None, folder: Path, merged: MergedModel
) -> dict[str, StoredTensor]:
    """What is not merged of a model with random weights, made again from its seed; nothing, if all of it is merged."""
    from diloco_node.cli.export.parts import trainer_seed
    from diloco_node.learner.builtin.hf_settings import HfModelSettings

    if not isinstance(model, HfModelSettings) or importlib.util.find_spec("transformers") is None:
        return {}
    from diloco_node.learner.builtin.hf_model import unmerged_state

    return unmerged_state(model, seed=trainer_seed(folder), merged=merged.tensors.keys())


def _base_tensors(base: Path, merged: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Of a saved model, under the names that the run has."""
    from diloco_node.storage.model_files import read_model

    found = read_model(base)
    if base.is_file() or found.keys() >= merged.keys() or importlib.util.find_spec("transformers") is None:
        return found
    from diloco_node.learner.builtin.hf_model import loaded_state

    loaded = loaded_state(base)
    return loaded if loaded.keys() >= merged.keys() else found


def _tokenizer(
    given: Path | None, base: Path | None, model: ModelSettings | HfModelSettings | None, folder: Path
) -> tuple[dict[str, Mapping[str, Any]], list[Path]]:
    """Files to write, and files to copy."""
    from diloco_node.cli.export.parts import tokenizer_files, trained_tokenizer, trainer_tokenizer
    from diloco_node.learner.builtin.byte_tokenizer import byte_tokenizer_files

    if given is not None:
        return {}, tokenizer_files(given)
    if model is not None:
        trained = trainer_tokenizer(folder)
        if not trained:
            return dict(byte_tokenizer_files(model.context)), []
        if Path(trained).exists():
            files, copies = trained_tokenizer(Path(trained), model.context)
            return dict(files), copies
        typer.echo(f"no tokenizer: the run's, {trained}, is not here: add --tokenizer with a copy of it", err=True)
    elif base is not None and base.is_dir():
        try:
            return {}, tokenizer_files(base)
        except ConfigError:
            return {}, []
    return {}, []


def as_document(merged: MergedModel, joined: JoinedTensors) -> dict[str, Any]:
    """export.json; the fields are described in docs/export.md."""
    return {
        "diloco_node": __version__,
        "run_id": merged.run_id,
        "region": merged.region,
        "is_final": merged.is_final,
        "versions": list(merged.versions),
        "tokens": merged.tokens,
        "manifest_digest": merged.manifest.digest,
        "merged": len(merged.tensors),
        "kept": list(joined.kept),
        "tied": list(joined.tied),
    }


def report_lines(report: Mapping[str, Any], out: Path) -> list[str]:
    """For people: what the folder holds."""
    versions = report["versions"]
    state = "finished" if report["is_final"] else "in mid-run"
    span = f", versions {min(versions)} to {max(versions)}" if versions else ""
    tokens = "" if report["tokens"] is None else f", {report['tokens']:,} tokens"
    kept = f", {len(report['kept'])} tensors that are not merged from the base" if report["kept"] else ""
    what = f"run {report['run_id']} ({state}{span}{tokens})"
    return [f"{out}: {what}, {report['merged']} merged tensors{kept}"]


def _loads(out: Path) -> bool:
    """Say whether transformers loads the folder; it counts as loading where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        typer.echo("not checked: transformers is not installed (pip install 'diloco-node[hf]')")
        return True
    from diloco_node.learner.builtin.hf_model import load_faults

    faults = load_faults(out)
    for fault in faults:
        typer.echo(fault, err=True)
    if not faults:
        typer.echo("from_pretrained loads it, no tensor is missing or left over")
    return not faults
