"""Certificates of live links: renewed, revoked, ended, and what the dialing side makes of a stolen one."""

import asyncio
import base64
import datetime as dt
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_node.errors import PeerCertificateRefused
from diloco_node.transport.authority import drop_old_authority, renew_authority, renew_regions
from diloco_node.transport.certificates import Identity
from diloco_node.transport.credentials import Credentials, check_proof, new_challenge, pem_to_der, prove
from diloco_node.transport.streams import dial
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import envelope as e
from tests.kit.transport_kit import DEADLINE_S, Mesh, Recorder, address, hello_of
from tests.kit.waiting import eventually


async def trio(mesh: Mesh) -> tuple[dict[str, GrpcTransport], dict[str, Recorder]]:
    """a, b and c, all linked; the smaller names dial."""
    transports: dict[str, GrpcTransport] = {}
    handlers: dict[str, Recorder] = {}
    for name in "cba":
        peers = {other: address(transports[other]) if other in transports else None for other in "abc" if other != name}
        transports[name], handlers[name] = await mesh.start(name, peers)
    await until_linked(transports)
    return transports, handlers


async def until_linked(transports: dict[str, GrpcTransport], *, without: str = "") -> None:
    expected = set(transports) - {without}
    await eventually(
        lambda: all(
            transports[name].peer_status()[peer].certificate is not None
            for name in expected
            for peer in expected - {name}
        )
    )


def certificate_of(transport: GrpcTransport, peer: str) -> bytes:
    certificate = transport.peer_status()[peer].certificate
    return certificate.fingerprint if certificate is not None else b""


async def test_links_show_the_certificate_of_the_other_side_in_both_directions(mesh: Mesh) -> None:
    transports, _ = await trio(mesh)
    for name, transport in transports.items():
        for peer in set("abc") - {name}:
            assert certificate_of(transport, peer) == mesh.identity(peer).certificate.fingerprint


@pytest.mark.parametrize("name", ["a", "b", "c"])
async def test_a_renewed_region_makes_its_links_again(mesh: Mesh, name: str) -> None:
    """Also where only the peers know an address."""
    transports, _ = await trio(mesh)
    renew_regions(mesh.folder / "run", [name])
    new = mesh.identity(name)
    assert await transports[name].renew(new) == {}
    others = set("abc") - {name}
    await eventually(
        lambda: all(certificate_of(transports[peer], name) == new.certificate.fingerprint for peer in others)
    )
    await until_linked(transports)
    await eventually(lambda: all(status.is_renewed for status in transports[name].peer_status().values()))
    assert all(transport.rejections == {} for transport in transports.values())


async def test_a_certificate_that_nobody_trusts_yet_leaves_the_links_as_they_are(mesh: Mesh) -> None:
    """Its region trusts both authorities, the other region only the old one."""
    a, at_a, _, at_b = await mesh.pair()
    before = [list(at_a.changes), list(at_b.changes)]
    renew_authority(mesh.folder / "run")
    renew_regions(mesh.folder / "run", ["a"])
    failures = await a.renew(mesh.identity("a"))
    assert "does not trust our certificate" in str(failures["b"])
    await asyncio.sleep(0.1)
    assert [at_a.changes, at_b.changes] == before
    assert not a.peer_status()["b"].is_renewed
    assert not a.links["b"].is_outdated, "it is tried again after a pause, not each second"
    a.links["b"]._remake_at_s = 0.0
    assert a.links["b"].is_outdated


async def test_an_authority_is_replaced_without_a_link_that_can_not_be_made(mesh: Mesh) -> None:
    transports, _ = await trio(mesh)
    folder = mesh.folder / "run"
    renew_authority(folder)
    for name, transport in transports.items():
        assert await transport.renew(mesh.identity(name)) == {}
    renew_regions(folder)
    for name, transport in transports.items():
        assert await transport.renew(mesh.identity(name)) == {}
    drop_old_authority(folder)
    for name, transport in transports.items():
        assert await transport.renew(mesh.identity(name)) == {}
    # A dial that crosses a renewal is made with the certificate before: that link is made once more.
    await eventually(
        lambda: all(
            certificate_of(transport, peer) == mesh.identity(peer).certificate.fingerprint
            for name, transport in transports.items()
            for peer in set("abc") - {name}
        )
    )
    assert all(transport.rejections == {} for transport in transports.values())


async def test_a_link_that_was_made_with_the_certificate_before_is_made_once_more(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a dial that was under way when the certificate changed, or that won against the new one."""
    a, _, b, _ = await mesh.pair()
    renew_regions(mesh.folder / "run", ["a"])
    newest = mesh.identity("a")
    with monkeypatch.context() as patch:
        patch.setattr(a.links["b"], "_dialing", asyncio.current_task())
        assert await a.renew(newest) == {}
        assert not a.peer_status()["b"].is_renewed
    await eventually(lambda: certificate_of(b, "a") == newest.certificate.fingerprint)
    await eventually(lambda: a.peer_status()["b"].is_renewed)


def change_while_dialing(
    transport: GrpcTransport, peer: str, change: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both streams of the dial are made then, and its session is not."""
    link = transport.links[peer]
    exchange = link._exchange_hellos

    async def exchange_and_change(*args: Any) -> bytes:
        try:
            return await exchange(*args)
        finally:
            change()

    monkeypatch.setattr(link, "_exchange_hellos", exchange_and_change)


async def test_a_certificate_that_changes_during_a_dial_is_seen(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    b, _ = await mesh.start("b", {"a": None})
    a, at_a = await mesh.start("a", {"b": None})
    renew_regions(mesh.folder / "run", ["a"])
    newest = mesh.identity("a")
    change_while_dialing(a, "b", lambda: setattr(a.credentials, "identity", newest), monkeypatch)
    a.follow({"b": address(b)})
    await at_a.until(lambda: at_a.is_up.get("b"))
    assert not a.peer_status()["b"].is_renewed
    await eventually(lambda: certificate_of(b, "a") == newest.certificate.fingerprint)


async def test_a_peer_that_is_not_trusted_any_more_at_the_end_of_a_dial_gets_no_lasting_link(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, _ = await mesh.start("b", {"a": None})
    a, at_a = await mesh.start("a", {"b": None})
    folder = mesh.folder / "run"
    renew_authority(folder)
    renew_regions(folder, ["a", "c"])
    shutil.rmtree(folder / "b")
    drop_old_authority(folder)
    newest = mesh.identity("a")
    change_while_dialing(a, "b", lambda: setattr(a.credentials, "identity", newest), monkeypatch)
    a.follow({"b": address(b)})
    await at_a.until(lambda: at_a.changes[:2] == [("b", True), ("b", False)])


async def test_a_link_that_can_not_be_made_again_holds_up_no_revocation(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports, handlers = await trio(mesh)
    renew_regions(mesh.folder / "run", ["a"])
    is_dialing = asyncio.Event()

    async def swallow(*_: object) -> None:
        is_dialing.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(transports["a"].links["b"], "_connect", swallow)
    transports["a"].credentials.identity = mesh.identity("a")
    await is_dialing.wait()
    transports["a"].credentials.revocations = frozenset({mesh.identity("c").certificate.fingerprint})
    await handlers["a"].until(lambda: not handlers["a"].is_up["c"])
    assert handlers["a"].is_up["b"]


async def test_links_with_an_authority_that_is_dropped_are_closed(mesh: Mesh) -> None:
    a, at_a, _, at_b = await mesh.pair()
    folder = mesh.folder / "run"
    renew_authority(folder)
    renew_regions(folder, ["a", "c"])
    shutil.rmtree(folder / "b")
    drop_old_authority(folder)
    await a.renew(mesh.identity("a"))
    await at_a.until(lambda: not at_a.is_up["b"])
    await at_b.until(lambda: not at_b.is_up["a"])


async def test_a_revoked_certificate_has_no_link_and_another_one_of_the_region_has(mesh: Mesh) -> None:
    transports, handlers = await trio(mesh)
    revocations = frozenset({mesh.identity("b").certificate.fingerprint})
    for name in "ac":
        transports[name].credentials.revocations = revocations
    for name in "ac":
        await handlers[name].until(lambda name=name: not handlers[name].is_up["b"])
    await eventually(lambda: "is revoked" in transports["a"].peer_status()["b"].error)
    await eventually(lambda: "is revoked" in transports["b"].peer_status()["c"].error)
    assert handlers["a"].is_up["c"]
    assert handlers["c"].is_up["a"]
    renew_regions(mesh.folder / "run", ["b"])
    await transports["b"].renew(mesh.identity("b"))
    await until_linked(transports)


@pytest.mark.parametrize("name", ["a", "b"])
async def test_a_link_ends_with_the_certificate_of_either_side(mesh: Mesh, name: str) -> None:
    for region in "ab":
        seconds = dt.timedelta(seconds=4) if region == name else dt.timedelta(days=1)
        renew_regions(mesh.folder / "run", [region], valid=seconds)
    a, at_a, b, at_b = await mesh.pair()
    end = mesh.identity(name).certificate.not_after
    await at_a.until(lambda: not at_a.is_up["b"])
    await at_b.until(lambda: not at_b.is_up["a"])
    assert dt.datetime.now(dt.UTC) >= end
    await eventually(lambda: "ended on" in a.peer_status()["b"].error or "expired" in a.peer_status()["b"].error)
    fault = {"a": a, "b": b}[name].credentials.document()["fault"]
    assert "certs renew" in fault
    renew_regions(mesh.folder / "run", [name])
    await {"a": a, "b": b}[name].renew(mesh.identity(name))
    await at_a.until(lambda: at_a.is_up["b"])


async def test_a_stolen_key_is_refused_where_it_is_dialed_too(mesh: Mesh) -> None:
    """The thief listens at b's address, with b's revoked certificate, and accepts whoever dials."""
    thief, _ = await mesh.start("b", {"a": None})
    a, at_a = await mesh.start("a", {"b": address(thief)})
    a.credentials.revocations = frozenset({mesh.identity("b").certificate.fingerprint})
    await eventually(lambda: "is revoked" in a.peer_status()["b"].error)
    assert not at_a.is_up.get("b")


async def test_an_asker_without_a_challenge_gets_no_proof(mesh: Mesh) -> None:
    b, _ = await mesh.start("b", {"a": None})
    stream = await dial(mesh.identity("a"), "b", address(b), e.Lane.CONTROL, timeout_s=DEADLINE_S)
    await stream.write(hello_of("a", e.Lane.CONTROL))
    await stream.read()
    assert await stream.peer_metadata("diloco-proof")
    await stream.aclose()
    assert prove(mesh.identity("b"), "a", "") == ()
    assert prove(mesh.identity("b"), "a", "0" * 65) == ()


def proof_of(identity: Identity, dialer: str, challenge: str) -> tuple[str, str]:
    (_, certificate), (_, proof) = prove(identity, dialer, challenge)
    return certificate, proof


def test_a_proof_holds_for_one_challenge_and_one_pair_of_regions(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    a, b, c = (mesh.identity(name) for name in "abc")
    credentials, challenge = Credentials(a), new_challenge()
    good = proof_of(b, "a", challenge)
    assert check_proof(credentials, "b", challenge, *good) == b.certificate
    stolen = base64.b64encode(b.certificate.encoding).decode()
    bad: list[tuple[str, str, tuple[str, str]]] = [
        ("of another challenge", "b", proof_of(b, "a", new_challenge())),
        ("for another dialer", "b", proof_of(b, "c", challenge)),
        ("of another region", "b", proof_of(c, "a", challenge)),
        ("a certificate with another's key", "b", (stolen, proof_of(c, "a", challenge)[1])),
        ("of another authority", "b", proof_of(mesh.identity("b", "stranger"), "a", challenge)),
        ("nothing", "b", ("", "")),
        ("no base64", "b", ("*", "*")),
        ("cut off", "b", (good[0][:100], good[1])),
        ("no signature", "b", (good[0], "")),
    ]
    for what, peer, texts in bad:
        with pytest.raises(PeerCertificateRefused) as caught:
            check_proof(credentials, peer, challenge, *texts)
        assert peer in str(caught.value), what
    assert pem_to_der(b"rubbish") == b""
    for executor in mesh.executors:
        executor.shutdown()
