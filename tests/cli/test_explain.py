"""`help CODE`, and that every error has a code, a page, and shows it."""

import inspect
import re

import pytest

from diloco_node import errors
from diloco_node.cli.explain import explanations, lines_of
from diloco_node.errors import DilocoError, PeerCertificateRefused
from diloco_node.main import main
from tests.kit.repository import ROOT

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, DilocoError)]


def test_every_error_has_a_code_and_a_remedy_of_its_own() -> None:
    codes = [vars(kind)["code"] for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert set(codes) == {code for code in explanations() if code.startswith("E-")}
    assert all(re.fullmatch(r"E(-[A-Z]+)+", code) for code in codes)
    assert all("remedy" in vars(kind) for kind in KINDS)


def test_the_page_has_a_section_for_each_code_with_what_help_says() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    sections = dict(re.findall(r"^## (E-[A-Z-]+)\n+(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    entries = explanations()
    assert list(sections) == [code for code in entries if code.startswith("E-")]
    for code, text in sections.items():
        flat = " ".join(text.split())
        assert entries[code].meaning in flat
        assert f"Exit code {entries[code].exit_code}." in flat


def test_help_explains_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "e-peer-cert"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == list(lines_of(explanations()["E-PEER-CERT"]))
    assert "E-PEER-CERT" in out
    assert PeerCertificateRefused.remedy in out
    assert "docs/errors.md#e-peer-cert" in out


def test_help_explains_alerts_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "A-PEER-DOWN"]) == 0
    out = capsys.readouterr().out
    assert "does not hear a peer" in out
    assert "docs/alerts.md" in out
    assert "exit" not in out


def test_help_alone_lists_all_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(explanations())


def test_help_of_an_unknown_code_offers_a_close_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "E-PEER-CRT"]) == 2
    assert "did you mean E-PEER-CERT?" in capsys.readouterr().err
