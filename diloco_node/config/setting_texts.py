"""Settings as run.toml would have them, in words. Without pydantic, which would hold up the daemon while it comes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from diloco_node.config.units import Duration
from diloco_node.core.settings_body import SettingsBody


def toml_text(value: Any) -> str:
    """A setting's value as it would be written in run.toml; None is `none`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml_text(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name} = {toml_text(item)}' for name, item in value.items())}}}"
    return json.dumps(str(value), ensure_ascii=False)


def setting_texts(body: SettingsBody) -> dict[str, str]:
    """By key in run.toml, each value as it would be written there."""
    return {f"rounds.{name}": toml_text(value) for name, value in section_values(body).items()}


def section_values(body: SettingsBody) -> dict[str, Any]:
    """By name in `[rounds]`, each value as its section has it."""
    values = asdict(body)
    return values | {"ballot_deadline_min": Duration(values.pop("ballot_deadline_min_ns"))}


def change_lines(before: SettingsBody, after: SettingsBody) -> list[str]:
    """Each setting that changes, with both values."""
    texts = setting_texts(before)
    return [f"{key} {texts[key]} -> {text}" for key, text in setting_texts(after).items() if text != texts[key]]


def difference_lines(file: Mapping[str, str], body: SettingsBody, *, unset: Collection[str]) -> list[str]:
    """Each setting that run.toml (by key the text there) has otherwise than the run, and what makes them agree.

    unset: keys that nobody has set here. Some of their defaults are by the run's length, which may have changed.
    """
    return [
        f"{key} is {file[key]} {'by default' if key in unset else 'in run.toml'} here, {text} in the run, which "
        f"counts: write {key.partition('.')[2]} = {text} under [rounds]"
        for key, text in setting_texts(body).items()
        if file.get(key, text) != text
    ]
