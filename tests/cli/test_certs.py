"""`diloco-node certs`: what it makes where, what it says to do next, and each refusal."""

from pathlib import Path

import pytest

from diloco_node.main import main
from diloco_node.transport.certificates import load_identity

RUN_TOML = """
[run]
id = "try"
certs_dir = "keys"

[regions.eu]
address = "10.0.0.1:7400"

[regions.us]
address = "10.0.0.2:7400"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_TOML)
    assert main(["certs", "init"]) == 0
    return tmp_path / "keys"


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["certs", *words]) == code
    captured = capsys.readouterr()
    return " ".join((captured.err if code else captured.out).split())


def test_a_region_is_added_to_the_folder_of_run_toml(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "keys/asia" in said(capsys, "add", "asia")
    assert load_identity(folder / "asia", region="asia", run_id="try")
    assert "is there already" in said(capsys, "add", "asia", code=2)
    assert "not that of run other" in said(capsys, "add", "india", "--run-id", "other", code=2)
    Path("run.toml").unlink()
    assert "keys/india" in said(capsys, "add", "india", "--out", "keys")


def test_regions_are_renewed_and_the_authority_in_three_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = load_identity(folder / "us").certificate
    text = said(capsys, "renew", "eu")
    assert "SIGHUP" in text
    assert "keys/eu" in text
    assert "keys/us" not in text
    assert "Then renew all regions" in said(capsys, "renew", "--ca")
    assert load_identity(folder / "us").certificate == before
    assert "certificates of eu, us are by the old" in said(capsys, "renew", "--drop-old-ca", code=2)
    assert "keys/us" in said(capsys, "renew")
    text = said(capsys, "renew", "--drop-old-ca")
    assert "trusts the new authority only" in text
    assert "signed by the old one: change them once more" in text
    assert len(load_identity(folder / "us").authorities) == 1


def test_one_thing_at_a_time_and_only_where_the_key_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "one thing at a time" in said(capsys, "renew", "eu", "--ca", code=2)
    assert "one thing at a time" in said(capsys, "renew", "--ca", "--drop-old-ca", code=2)
    assert "asia/node.pem is missing" in said(capsys, "renew", "asia", code=2)
    (folder / "ca.key").unlink()
    for words in (["renew"], ["renew", "--ca"], ["renew", "--drop-old-ca"], ["add", "asia"]):
        assert "only the holder of the authority's key" in said(capsys, *words, code=2)
