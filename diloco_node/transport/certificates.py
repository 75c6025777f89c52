"""The certificates of a run: their names and files, and the checks before one is used.

The authority belongs to one run: to hold a certificate that it signed is to be a member. A node's certificate names its
region (common name) and `<region>.<run id>.diloco` (subject alternative name), which the dialing side demands; so both
sides know whom they talk to, whatever address was dialed. `authority` makes them. Encoding is `cryptography`'s work.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from diloco_node.core.shapes import is_region_name
from diloco_node.errors import IdentityError, PeerCertificateRefused

PEM_BYTES_MAX: Final = 64 * 2**10

CA_CERT: Final = "ca.pem"
NODE_CERT: Final = "node.pem"
NODE_KEY: Final = "node.key"
CA_KEY: Final = "ca.key"
SIGNATURE: Final = ec.ECDSA(hashes.SHA256())
"""The way in which a key signs what is no certificate."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A region's certificate that an authority of the run has signed.

    Attributes:
        fingerprint: SHA-256 over `encoding`, by which it is revoked.
        not_after: UTC; the end of the certificate, or of the authority that signed it if that is earlier.
        encoding: DER.
    """

    region: str
    run_id: str
    fingerprint: bytes
    not_after: dt.datetime
    encoding: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's key and certificates, checked by `load_identity`.

    Attributes:
        region, run_id: as the certificate names them. ca_pem, cert_pem, key_pem: what TLS needs.
        certificate: of `cert_pem`. authorities: of `ca_pem`; several while one replaces another.
    """

    region: str
    run_id: str
    ca_pem: bytes
    cert_pem: bytes
    key_pem: bytes
    certificate: Certificate
    authorities: tuple[x509.Certificate, ...]

    def __repr__(self) -> str:
        return f"Identity({tls_name(self.region, self.run_id)}, until {self.certificate.not_after:%Y-%m-%d})"

    def admit(self, encoding: bytes, peer: str) -> Certificate:
        """Check a peer's certificate, DER, as TLS does: issuer, run and region, but not its end.

        Raises PeerCertificateRefused: no authority of ours has signed it for this peer.
        """
        try:
            certificate = x509.load_der_x509_certificate(encoding)
        except (ValueError, x509.InvalidVersion):
            raise PeerCertificateRefused(f"{peer} shows no certificate") from None
        issuer = issuer_of(certificate, self.authorities)
        if issuer is None:
            raise PeerCertificateRefused(
                f"the certificate of {peer} was signed by an authority that {self.region} does not trust (any more): "
                f"renew it with diloco-node certs renew {peer}"
            )
        try:
            region, run_id = names_of(certificate, f"the certificate of {peer}")
        except IdentityError as error:
            raise PeerCertificateRefused(str(error)) from None
        if (region, run_id) != (peer, self.run_id):
            raise PeerCertificateRefused(f"{peer} shows the certificate of {tls_name(region, run_id)}")
        return _facts(certificate, issuer, region, run_id)

    def signature_fault(self, statement: bytes, signature: bytes) -> str:
        """See `core.ledger.roster.Authority`."""
        for authority in self.authorities:
            key = authority.public_key()
            with contextlib.suppress(InvalidSignature):
                if isinstance(key, ec.EllipticCurvePublicKey):
                    key.verify(signature, statement, SIGNATURE)
                    return ""
        return (
            f"no authority in the {CA_CERT} of {self.region} has signed it for these members of run {self.run_id}: "
            f"sign it with the run's {CA_KEY}. If the authority was replaced since, add the old one there, or change "
            "the members once more, which the new one signs"
        )


def tls_name(region: str, run_id: str) -> str:
    """The name that a region's certificate carries and the dialing side demands."""
    return f"{region}.{run_id}.diloco"


def load_identity(
    folder: Path, *, region: str | None = None, run_id: str | None = None, now: dt.datetime | None = None
) -> Identity:
    """Read a region's folder, as `init_run` makes it, and check that it will be accepted, for this region and run, now.

    Raises IdentityError: a file is missing or damaged, the certificate has not begun or is over, is for another region
    or run, by another authority, or has another key. The message says what to do.
    """
    ca_pem, cert_pem, key_pem = (read_pem(folder / name) for name in (CA_CERT, NODE_CERT, NODE_KEY))
    cert, *_ = parse_certificates(cert_pem, folder / NODE_CERT)
    authorities = parse_certificates(ca_pem, folder / CA_CERT)
    _check_key(cert, key_pem, folder)
    issuer = issuer_of(cert, authorities)
    if issuer is None:
        raise IdentityError(
            f"{folder / NODE_CERT} was not signed by {folder / CA_CERT}: they are from two runs, or of two times; "
            "copy the region's whole folder again from where `diloco-node certs` made it"
        )
    now = now or dt.datetime.now(dt.UTC)
    for certificate, name, remedy in ((cert, NODE_CERT, "renew"), (issuer, CA_CERT, "renew --ca")):
        _check_dates(certificate, folder / name, now, remedy)
    cert_region, cert_run = names_of(cert, folder / NODE_CERT)
    for kind, expectation, certificate_name in (("region", region, cert_region), ("run", run_id, cert_run)):
        if expectation is not None and expectation != certificate_name:
            raise IdentityError(
                f"{folder / NODE_CERT} is for {kind} {certificate_name}, this node is {kind} {expectation}: "
                f"use the folder that `diloco-node certs` made for {expectation}"
            )
    facts = _facts(cert, issuer, cert_region, cert_run)
    return Identity(cert_region, cert_run, ca_pem, cert_pem, key_pem, facts, authorities)


def _facts(certificate: x509.Certificate, issuer: x509.Certificate, region: str, run_id: str) -> Certificate:
    not_after = min(certificate.not_valid_after_utc, issuer.not_valid_after_utc)
    encoding = certificate.public_bytes(serialization.Encoding.DER)
    return Certificate(region, run_id, certificate.fingerprint(hashes.SHA256()), not_after, encoding)


def read_pem(path: Path) -> bytes:
    """Read a file of certificates or a key. Raises IdentityError."""
    try:
        with path.open("rb") as file:
            data = file.read(PEM_BYTES_MAX + 1)
    except FileNotFoundError:
        raise IdentityError(
            f"{path} is missing: run `diloco-node certs init` once for the run, and copy this region's folder here"
        ) from None
    except OSError as error:
        raise IdentityError(f"{path} can't be read ({error.strerror}): check its owner and mode") from error
    if len(data) > PEM_BYTES_MAX:
        raise IdentityError(f"{path} is over {PEM_BYTES_MAX} bytes: that is no certificate or key")
    return data


def parse_certificates(pem: bytes, path: Path) -> tuple[x509.Certificate, ...]:
    """Parse the certificates of a file: at least one, in its order. Raises IdentityError."""
    try:
        return tuple(x509.load_pem_x509_certificates(pem))
    except ValueError:
        raise IdentityError(f"{path} holds no certificate in PEM form: copy it again from where it was made") from None


def _check_key(cert: x509.Certificate, key_pem: bytes, folder: Path) -> None:
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError):
        raise IdentityError(f"{folder / NODE_KEY} holds no unencrypted key in PEM form: copy it again") from None
    if key.public_key() != cert.public_key():
        raise IdentityError(
            f"{folder / NODE_KEY} is not the key of {folder / NODE_CERT}: copy both files from the same folder"
        )
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise IdentityError(f"{folder / NODE_KEY} is no elliptic-curve key: make it with `diloco-node certs`")


def issuer_of(cert: x509.Certificate, authorities: tuple[x509.Certificate, ...]) -> x509.Certificate | None:
    """Find the authority that has signed a certificate; None: none of these has."""
    for authority in authorities:
        try:
            cert.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            continue
        return authority
    return None


def _check_dates(cert: x509.Certificate, path: Path, now: dt.datetime, remedy: str) -> None:
    if now > cert.not_valid_after_utc:
        raise IdentityError(
            f"{path} expired on {cert.not_valid_after_utc:%Y-%m-%d %H:%M} UTC and it is {now:%Y-%m-%d %H:%M}: "
            f"make another with `diloco-node certs {remedy}` (or set this machine's clock)"
        )
    if now < cert.not_valid_before_utc:
        raise IdentityError(
            f"{path} is valid from {cert.not_valid_before_utc:%Y-%m-%d %H:%M} UTC and it is {now:%Y-%m-%d %H:%M}: "
            "set this machine's clock"
        )


def names_of(cert: x509.Certificate, place: Path | str) -> tuple[str, str]:
    """Region and run id that a node's certificate names, in both places alike. Raises IdentityError."""
    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        dns = names.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        dns = []
    common = [str(attribute.value) for attribute in cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    labels = dns[0].split(".") if len(dns) == 1 else []
    if len(labels) != 3 or labels[2] != "diloco" or common != [labels[0]] or not is_region_name(labels[0]):
        raise IdentityError(f"{place} is no node certificate of diloco-node: make one with `diloco-node certs add`")
    return labels[0], labels[1]
