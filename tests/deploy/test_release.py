"""What is released: wheel and sdist, built from the checkout, installed where nothing else is, and run."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution, distribution
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.kit.commands import NO_FORK_SERVER, SMALL_MODEL
from tests.kit.repository import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """wheel and sdist of a copy of the checkout, as `make dist` builds them: the wheel from the sdist."""
    pytest.importorskip("build", reason="the package `build` is not installed: NOT TESTED")
    source, out = tmp_path_factory.mktemp("source") / "diloco", tmp_path_factory.mktemp("dist")
    aside = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "build", "runs", "site", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, source, ignore=aside)
    run(sys.executable, "-m", "build", "--outdir", str(out), str(source), cwd=out)
    return out


def run(*words: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_wheel_and_sdist_hold_the_whole_package_and_nothing_else(dist: Path) -> None:
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    package = ROOT / "diloco_node"
    files = {
        str(path.relative_to(ROOT)) for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == files
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert files <= names
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


def requirements(name: str) -> dict[str, Distribution]:
    """The distributions that this one says it needs, and what these need, as they are installed here."""
    closure: dict[str, Distribution] = {}
    names = [name]
    while names:
        for text in distribution(names.pop()).requires or ():
            requirement = Requirement(text)
            key = canonicalize_name(requirement.name)
            if key not in closure and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                closure[key] = distribution(requirement.name)
                names.append(requirement.name)
    return closure


def link_files(package: Distribution, site: Path) -> None:
    """Put a distribution's files, and what Python has made of them, into another environment; not its programs."""
    for file in package.files or ():
        if ".." in file.parts or file.suffix == ".pyc":
            continue
        source = Path(str(file.locate())).resolve()
        for path in (source, Path(cache_from_source(source)) if source.suffix == ".py" else source):
            target = site / Path(file).parent / path.relative_to(source.parent)
            if target.exists() or not path.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                target.hardlink_to(path)
            except OSError:  # another file system
                shutil.copy2(path, target)


def test_the_wheel_runs_where_nothing_else_is_installed(dist: Path, tmp_path: Path) -> None:
    """What the wheel says it needs is taken from this environment: pip would unpack torch for minutes."""
    (wheel,) = dist.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"), cwd=tmp_path)
    programs = tmp_path / "venv" / "bin"
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel), cwd=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))  # the wheel's own words, not those of the checkout
        for package in requirements("diloco-node").values():
            link_files(package, site)
    run(*pip, "check", cwd=tmp_path)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DILOCO_"))}
    env |= NO_FORK_SERVER | SMALL_MODEL
    node = str(programs / "diloco-node")
    assert "start" in run(node, "--help", cwd=tmp_path, env=env)
    where = run(
        str(programs / "python"), "-c", "import diloco_node; print(diloco_node.__file__)", cwd=tmp_path, env=env
    )
    assert where.startswith(str(tmp_path)), "the installed one, not the checkout"
    report = json.loads(run(node, "demo", "--regions", "2", "--seconds", "5", "--json", cwd=tmp_path, env=env))
    assert report["equal_digests"]
    assert report["rounds_committed"] > 0
    assert len(report["regions"]) == 2
