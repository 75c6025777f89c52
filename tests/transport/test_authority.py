"""transport/authority.py: regions are added, certificates renewed, the authority replaced; each refusal."""

import datetime as dt
import shutil
import stat
from pathlib import Path

import pytest

from diloco_node.errors import ConfigError, IdentityError, PeerCertificateRefused
from diloco_node.transport.authority import (
    add_regions,
    drop_old_authority,
    init_run,
    renew_authority,
    renew_regions,
    sign,
)
from diloco_node.transport.certificates import load_identity


@pytest.fixture
def run(tmp_path: Path) -> Path:
    init_run(tmp_path / "run", "run1", ["eu", "us"])
    return tmp_path / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_region_is_added_by_the_same_authority(run: Path) -> None:
    before = contents(run)
    add_regions(run, ["asia"])
    identity = load_identity(run / "asia", region="asia", run_id="run1")
    assert identity.admit(load_identity(run / "eu").certificate.encoding, "eu").region == "eu"
    assert {name: contents(run)[name] for name in before} == before
    assert stat.S_IMODE((run / "asia" / "node.key").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("regions", "run_id", "error"),
    [
        (["asia", "eu"], None, r"eu/node\.pem is there already.*certs renew"),
        (["../x"], None, "region '../x'"),
        (["asia"], "run2", "is the run1 authority, not that of run run2"),
        ([], None, "no regions"),
    ],
)
def test_what_can_not_be_added_changes_nothing(run: Path, regions: list[str], run_id: str | None, error: str) -> None:
    before = contents(run)
    with pytest.raises(ConfigError, match=error):
        add_regions(run, regions, run_id=run_id)
    assert contents(run) == before


def test_a_long_run_id_is_asked_for_and_checked(tmp_path: Path) -> None:
    long = "r" * 60
    init_run(tmp_path, long, ["eu"])
    with pytest.raises(ConfigError, match="--run-id"):
        add_regions(tmp_path, ["us"])
    add_regions(tmp_path, ["us"], run_id=long)
    assert load_identity(tmp_path / "us").run_id == long


def commands(folder: Path) -> list[object]:
    return [
        lambda: add_regions(folder, ["asia"]),
        lambda: renew_regions(folder),
        lambda: renew_authority(folder),
        lambda: drop_old_authority(folder),
    ]


@pytest.mark.parametrize("number", range(4))
def test_without_the_authoritys_own_key_nothing_is_made(run: Path, tmp_path: Path, number: int) -> None:
    init_run(tmp_path / "other", "run1", ["eu"])
    spoils = {
        r"ca\.key is missing: only the holder": lambda: (run / "ca.key").unlink(),
        r"ca\.key is not the key of": lambda: shutil.copy(tmp_path / "other" / "ca.key", run / "ca.key"),
        "holds no unencrypted key": lambda: (run / "ca.key").write_bytes(b"rubbish"),
        "holds no certificate in PEM form": lambda: (run / "ca.pem").write_bytes(b"rubbish"),
    }
    whole = contents(run)
    for error, spoil in spoils.items():
        for name, data in whole.items():
            (run / name).write_bytes(data)
        spoil()
        before = contents(run)
        with pytest.raises(ConfigError, match=error):
            commands(run)[number]()  # type: ignore[operator]
        assert contents(run) == before


def test_a_renewed_region_has_another_key_and_its_old_certificate_is_kept(run: Path) -> None:
    before = load_identity(run / "eu")
    others = contents(run / "us")
    assert renew_regions(run, ["eu"]) == ["eu"]
    after = load_identity(run / "eu", region="eu", run_id="run1")
    assert after.key_pem != before.key_pem
    assert after.certificate.fingerprint != before.certificate.fingerprint
    assert (run / "eu" / "node.pem.old").read_bytes() == before.cert_pem
    assert stat.S_IMODE((run / "eu" / "node.key").stat().st_mode) == 0o600
    assert contents(run / "us") == others
    assert renew_regions(run) == ["eu", "us"]


def test_a_region_that_is_renewed_under_another_name_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"asia/node\.pem is missing.*certs add"):
        renew_regions(run, ["asia"])
    (run / "us").rename(run / "asia")
    before = contents(run)
    with pytest.raises(ConfigError, match="is the certificate of us"):
        renew_regions(run)
    assert contents(run) == before


def test_no_certificate_outlives_its_authority(run: Path) -> None:
    late = dt.datetime.now(dt.UTC) + dt.timedelta(days=3600)
    renew_regions(run, ["eu"], now=late)
    identity = load_identity(run / "eu", now=late)
    assert identity.certificate.not_after < late + dt.timedelta(days=51)
    for make in (lambda now: renew_regions(run, now=now), lambda now: add_regions(run, ["asia"], now=now)):
        with pytest.raises(ConfigError, match="certs renew --ca"):
            make(late + dt.timedelta(days=100))
    renew_authority(run, now=late + dt.timedelta(days=100))


def test_an_authority_is_replaced_in_three_steps(run: Path) -> None:
    old = {name: load_identity(run / name) for name in ("eu", "us")}
    with pytest.raises(ConfigError, match="there is none to drop"):
        drop_old_authority(run)
    assert renew_authority(run) == ["eu", "us"]
    both = {name: load_identity(run / name) for name in ("eu", "us")}
    assert both["eu"].certificate == old["eu"].certificate
    assert len(both["eu"].authorities) == 2
    with pytest.raises(ConfigError, match="holds an older authority still"):
        renew_authority(run)
    renew_regions(run, ["eu"])
    new = load_identity(run / "eu")
    assert both["us"].admit(new.certificate.encoding, "eu") == new.certificate
    assert new.admit(old["us"].certificate.encoding, "us").region == "us"
    with pytest.raises(ConfigError, match="certificates of us are by the old authority"):
        drop_old_authority(run)
    renew_regions(run, ["us"])
    assert drop_old_authority(run) == ["eu", "us"]
    last = load_identity(run / "eu")
    assert len(last.authorities) == 1
    assert last.admit(load_identity(run / "us").certificate.encoding, "us").region == "us"
    with pytest.raises(PeerCertificateRefused, match="does not trust"):
        last.admit(old["us"].certificate.encoding, "us")
    add_regions(run, ["asia"])
    assert last.admit(load_identity(run / "asia").certificate.encoding, "asia").region == "asia"


@pytest.mark.parametrize(
    ("name", "error"), [("ca.pem", "was not signed by"), ("node.key", "is not the key"), ("node.pem", "is not the key")]
)
def test_files_of_two_times_are_found(run: Path, tmp_path: Path, name: str, error: str) -> None:
    """As a copy that broke off leaves them."""
    shutil.copytree(run, tmp_path / "before")
    renew_authority(run)
    renew_regions(run)
    drop_old_authority(run)
    shutil.copy(run / "eu" / name, tmp_path / "before" / "eu" / name)
    with pytest.raises(IdentityError, match=error):
        load_identity(tmp_path / "before" / "eu")


def test_a_disk_that_refuses_is_told(run: Path) -> None:
    shutil.rmtree(run / "us")
    (run / "asia").write_text("a file")
    with pytest.raises(ConfigError, match="can't be written"):
        add_regions(run, ["asia"])


def test_what_an_authority_signs_is_good_where_it_is_trusted(run: Path, tmp_path: Path) -> None:
    statement = b"the members of a run"
    identity, signature = load_identity(run / "eu"), sign(run / "ca.key", statement)
    assert identity.signature_fault(statement, signature) == ""
    init_run(tmp_path / "other", "run1", ["eu"])
    for words, octets in (
        (statement + b"!", signature),
        (statement, sign(tmp_path / "other" / "ca.key", statement)),
        (statement, b""),
        (statement, signature[:-1]),
    ):
        assert "no authority in the ca.pem of eu has signed it" in identity.signature_fault(words, octets)
    renew_authority(run)
    both = load_identity(run / "eu")
    assert both.signature_fault(statement, signature) == "", "signed by the one before"
    assert both.signature_fault(statement, sign(run / "ca.key", statement)) == ""
    renew_regions(run)
    drop_old_authority(run)
    fault = load_identity(run / "eu").signature_fault(statement, signature)
    assert "add the old one there, or change the members once more, which the new one signs" in fault
    (run / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"only the holder of the authority's key .* changes the members of a run"):
        sign(run / "ca.key", statement)
