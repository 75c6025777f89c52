"""transport/certificates.py: a run's certificates, and the error for each wrong one."""

import datetime as dt
import shutil
import stat
from pathlib import Path

import pytest

from diloco_node.errors import ConfigError, IdentityError
from diloco_node.transport.authority import init_run
from diloco_node.transport.certificates import Certificate, Identity, load_identity, tls_name


@pytest.fixture
def run(tmp_path: Path) -> Path:
    init_run(tmp_path / "run", "run1", ["eu", "us-east"])
    return tmp_path / "run"


def refusal(folder: Path, **expected: object) -> str:
    with pytest.raises(IdentityError) as caught:
        load_identity(folder, **expected)  # type: ignore[arg-type]
    return str(caught.value)


def test_each_region_gets_an_identity(run: Path) -> None:
    identity = load_identity(run / "eu", region="eu", run_id="run1")
    assert (identity.region, identity.run_id) == ("eu", "run1")
    assert identity.certificate.not_after > dt.datetime.now(dt.UTC) + dt.timedelta(days=300)
    assert identity.ca_pem == load_identity(run / "us-east").ca_pem


def test_keys_are_for_their_owner_only_and_not_in_a_repr(run: Path) -> None:
    for key in (run / "ca.key", run / "eu" / "node.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert "PRIVATE" not in repr(load_identity(run / "eu"))
    assert not (run / "eu" / "ca.key").exists()


def test_nothing_is_overwritten(run: Path) -> None:
    before = (run / "ca.pem").read_bytes()
    with pytest.raises(ConfigError, match="not overwritten"):
        init_run(run, "run1", ["eu"])
    (run / "ca.pem").unlink()
    (run / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"eu/node\.pem is there already"):
        init_run(run, "run1", ["eu"])
    assert not (run / "ca.pem").exists()
    assert before


@pytest.mark.parametrize(
    ("run_id", "regions", "error"),
    [
        ("Run", ["eu"], "run id 'Run'"),
        ("run1", [], "no regions"),
        ("run1", ["../x"], "region '../x'"),
        ("run1", ["eu", "eu"], "twice"),
    ],
)
def test_bad_names_are_refused_before_anything_is_written(
    tmp_path: Path, run_id: str, regions: list[str], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        init_run(tmp_path / "new", run_id, regions)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="can't be written"):
        init_run(tmp_path / "file" / "run", "run1", ["eu"])


@pytest.mark.parametrize("name", ["ca.pem", "node.pem", "node.key"])
def test_a_missing_file_is_named_with_the_remedy(run: Path, name: str) -> None:
    (run / "eu" / name).unlink()
    message = refusal(run / "eu")
    assert name in message
    assert "certs init" in message


@pytest.mark.parametrize("name", ["ca.pem", "node.pem", "node.key"])
@pytest.mark.parametrize("data", [b"", b"rubbish", b"x" * 70_000])
def test_a_file_without_pem_is_named(run: Path, name: str, data: bytes) -> None:
    (run / "eu" / name).write_bytes(data)
    assert name in refusal(run / "eu")


def test_another_regions_folder_and_another_run_are_named(run: Path) -> None:
    assert "is for region eu, this node is region us-east" in refusal(run / "eu", region="us-east")
    assert "is for run run1, this node is run run2" in refusal(run / "eu", run_id="run2")


def test_a_key_of_another_certificate_is_found(run: Path) -> None:
    shutil.copy(run / "us-east" / "node.key", run / "eu" / "node.key")
    assert "is not the key of" in refusal(run / "eu")


def test_an_authority_of_another_run_is_found(run: Path, tmp_path: Path) -> None:
    init_run(tmp_path / "other", "run1", ["eu"])
    shutil.copy(tmp_path / "other" / "ca.pem", run / "eu" / "ca.pem")
    assert "was not signed by" in refusal(run / "eu")


def test_expiry_and_a_start_in_the_future_are_told_apart(run: Path) -> None:
    now = dt.datetime.now(dt.UTC)
    assert "expired on" in refusal(run / "eu", now=now + dt.timedelta(days=366))
    assert "is valid from" in refusal(run / "eu", now=now - dt.timedelta(hours=2))
    assert load_identity(run / "eu", now=now - dt.timedelta(minutes=50)).region == "eu"


def test_the_authoritys_own_certificate_is_no_identity(run: Path) -> None:
    shutil.copy(run / "ca.pem", run / "eu" / "node.pem")
    shutil.copy(run / "ca.key", run / "eu" / "node.key")
    assert "no node certificate" in refusal(run / "eu")


def test_tls_names() -> None:
    assert tls_name("eu", "run1") == "eu.run1.diloco"
    certificate = Certificate("eu", "run1", b"", dt.datetime(2030, 1, 1, tzinfo=dt.UTC), b"")
    assert "eu.run1.diloco" in repr(Identity("eu", "run1", b"", b"", b"", certificate, ()))
