"""Where the repository lies, wherever in it a test lies; and how a test starts a module of the tests."""

import os
import sys
from pathlib import Path
from types import FunctionType

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
"""The folder with pyproject.toml, docs, benchmarks, netem and docker-compose.yml."""


def module_command(main: FunctionType) -> list[str]:
    """The words that run the module of this function as a program, in the same Python."""
    module = main.__module__
    folder = Path(main.__code__.co_filename).resolve().parents[module.count(".")]
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return ["env", f"PYTHONPATH={path}", sys.executable, "-m", module]
