"""The identity that a node shows, the certificates of peers that it takes, and how an accepting side proves its own.

The proof is a signature over the dialing side's challenge (`greeting`). It names both regions: whoever holds a revoked
key can't have another region's daemon answer for it.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import re
import secrets
from collections.abc import Iterable
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from diloco_node.errors import PeerCertificateRefused
from diloco_node.transport.certificates import SIGNATURE, Certificate, Identity

CHALLENGE_KEY: Final = "diloco-challenge"
CERTIFICATE_KEY: Final = "diloco-certificate"
PROOF_KEY: Final = "diloco-proof"

_CHALLENGE: Final = re.compile("[0-9a-f]{64}", re.ASCII)
FINGERPRINT_SHOWN: Final = 16
"""Characters of a fingerprint in texts."""


class Credentials:
    """Says which certificates are good now.

    Attributes:
        identity: ours, for new connections. shown: the certificate that each peer showed last.
        revocations: fingerprints that the ledger revokes. Links by them are closed within a second.
    """

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.revocations: frozenset[bytes] = frozenset()
        self.shown: dict[str, Certificate] = {}

    def document(self) -> dict[str, Any]:
        """Our certificate, for the status: its end, and why no link may go on with it; empty if it may."""
        certificate = self.identity.certificate
        return {
            "fingerprint": certificate.fingerprint.hex(),
            "expires_unix": certificate.not_after.timestamp(),
            "days_left": (certificate.not_after - wall_clock()) / dt.timedelta(days=1),
            "fault": self.fault(certificate),
        }

    def take(self, peer: str, encoding: bytes) -> Certificate:
        """Check the certificate, DER, by which a peer connects. Raises PeerCertificateRefused."""
        certificate = self.shown[peer] = self.identity.admit(encoding, peer)
        if why := self.fault(certificate):
            raise PeerCertificateRefused(f"{peer}: {why}")
        return certificate

    def fault(self, certificate: Certificate) -> str:
        """Say why no link may go on with a certificate, ours or a peer's; empty if one may."""
        name = f"the certificate {fingerprint_text(certificate)} of {certificate.region}"
        if certificate.fingerprint in self.revocations:
            return f"{name} is revoked: give the region another one with diloco-node certs renew {certificate.region}"
        if wall_clock() > certificate.not_after:
            return f"{name} ended on {certificate.not_after:%Y-%m-%d %H:%M} UTC: renew it with diloco-node certs renew"
        return ""

    def link_fault(self, certificates: Iterable[Certificate], *, is_renewed: bool) -> str:
        """Say why a link with these certificates may not go on; empty: it may.

        is_renewed: our identity, and the authorities that it trusts, are others since.
        """
        for certificate in certificates:
            if why := self.fault(certificate):
                return why
            if is_renewed and certificate.region != self.identity.region:
                try:
                    self.identity.admit(certificate.encoding, certificate.region)
                except PeerCertificateRefused as error:
                    return str(error)
        return ""


def wall_clock() -> dt.datetime:
    """The time by which certificates end."""
    return dt.datetime.now(dt.UTC)


def fingerprint_text(certificate: Certificate) -> str:
    """The beginning of the fingerprint, in hexadecimal."""
    return certificate.fingerprint.hex()[:FINGERPRINT_SHOWN]


def pem_to_der(pem: bytes) -> bytes:
    """Return the first certificate of a PEM text as DER; empty if there is none."""
    try:
        return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)
    except (ValueError, x509.InvalidVersion):
        return b""


def new_challenge() -> str:
    """Return 32 random bytes, in hexadecimal."""
    return secrets.token_hex(32)


def prove(identity: Identity, dialer: str, challenge: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that answers a dialing region's challenge; none if it sent none."""
    if not _CHALLENGE.fullmatch(challenge):
        return ()
    key = serialization.load_pem_private_key(identity.key_pem, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)  # checked when it was loaded
    signature = key.sign(_statement(identity.run_id, dialer, identity.region, challenge), SIGNATURE)
    certificate = base64.b64encode(identity.certificate.encoding).decode()
    return ((CERTIFICATE_KEY, certificate), (PROOF_KEY, base64.b64encode(signature).decode()))


def check_proof(credentials: Credentials, peer: str, challenge: str, certificate_text: str, proof: str) -> Certificate:
    """Return the certificate of the peer that answered our challenge. Raises PeerCertificateRefused."""
    identity = credentials.identity
    try:
        encoding, signature = (base64.b64decode(text, validate=True) for text in (certificate_text, proof))
    except (binascii.Error, ValueError):
        encoding = signature = b""
    certificate = credentials.take(peer, encoding)
    key = x509.load_der_x509_certificate(encoding).public_key()
    try:
        assert isinstance(key, ec.EllipticCurvePublicKey)
        key.verify(signature, _statement(identity.run_id, identity.region, peer, challenge), SIGNATURE)
    except (AssertionError, InvalidSignature):
        raise PeerCertificateRefused(f"{peer} does not prove that the key of its certificate is its own") from None
    return certificate


def _statement(run_id: str, dialer: str, acceptor: str, challenge: str) -> bytes:
    return "\n".join(("diloco-node link", run_id, dialer, acceptor, challenge)).encode()
