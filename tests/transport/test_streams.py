"""transport/streams.py: gRPC's texts in words that say what to look at. The rest of it is met by every link's test."""

from __future__ import annotations

import pytest

from diloco_node.transport.streams import explain

CONNECTING = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:7400:"


@pytest.mark.parametrize(
    ("details", "text"),
    [
        (f"{CONNECTING} Failed to connect to remote host: Connection refused (111)", "(connection refused)"),
        (f"{CONNECTING} Socket closed", "closed the connection after the handshake: it does not trust our certificate"),
        (f"{CONNECTING} Connection reset by peer", "does not trust our certificate, or is stopping"),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "the peer's certificate has expired"),
        ("CERTIFICATE_VERIFY_FAILED: self signed", "another run's authority"),
        ("Stream removed (Socket closed)", "the connection was closed: the other side has ended"),
        ("Stream removed (recvmsg:Connection reset by peer (104))", "the connection was closed"),
        ("Stream removed (recvmsg:Connection timed out (110))", "timed out: nothing comes through any more"),
        ("something new\nin two lines", "something new in two lines"),
    ],
)
def test_failures_are_explained_in_words(details: str, text: str) -> None:
    assert text in explain(details)


def test_a_long_text_is_cut() -> None:
    assert len(explain("x" * 5000)) == 300
