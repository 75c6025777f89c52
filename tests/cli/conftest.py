"""For the tests of commands: what the shell of whoever runs them has set says nothing here."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_settings_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DILOCO_")]:
        monkeypatch.delenv(name)
