"""A run's certificate authority, its node certificates, and the checks before one is used.

The authority belongs to one run: to hold a certificate that it signed is to be a member. A node's certificate names its
region (common name) and `<region>.<run id>.diloco` (subject alternative name), which the dialing side demands; so both
sides know whom they talk to, whatever address was dialed. Encoding and signing are `cryptography`'s work.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from diloco_node.errors import ConfigError, IdentityError
from diloco_node.wire.message_schema import is_region_name

VALID_DAYS: Final = 365
CA_VALID_DAYS: Final = 3650

CLOCK_SLACK: Final = dt.timedelta(hours=1)
"""Certificates begin an hour before they are made, for machines whose clocks are behind."""

PEM_BYTES_MAX: Final = 64 * 2**10

_CA_CERT: Final = "ca.pem"
_CA_KEY: Final = "ca.key"
_NODE_CERT: Final = "node.pem"
_NODE_KEY: Final = "node.key"


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's key and certificates, checked by `load_identity`.

    Attributes:
        region, run_id: as the certificate names them.
        ca_pem, cert_pem, key_pem: what TLS needs. The key stays out of the repr.
        not_after: end of validity, UTC.
    """

    region: str
    run_id: str
    ca_pem: bytes
    cert_pem: bytes
    key_pem: bytes
    not_after: dt.datetime

    def __repr__(self) -> str:
        return f"Identity({tls_name(self.region, self.run_id)}, until {self.not_after:%Y-%m-%d})"


def tls_name(region: str, run_id: str) -> str:
    """The name that a region's certificate carries and the dialing side demands."""
    return f"{region}.{run_id}.diloco"


def init_run(folder: Path, run_id: str, regions: Sequence[str], *, now: dt.datetime | None = None) -> None:
    """Make a run's authority and one certificate per region.

    Writes `folder/ca.pem`, `folder/ca.key` and, per region, `folder/<region>/{ca.pem,node.pem,node.key}`. A region
    gets its own subfolder, and nothing else. Keys are readable by their owner only; `ca.key` can make new members, so
    it should leave the machines that train.

    Args:
        folder: made if it is not there. run_id: part of the certificates' name.
        regions: at least one, each `[a-z0-9-]{1,63}`.
        now: start of validity; the clock's when None.

    Raises:
        ConfigError: a bad name, or some of the files are there already (nothing is overwritten).
    """
    _check_names(run_id, regions)
    paths = [folder / _CA_CERT, folder / _CA_KEY]
    paths += [folder / region / name for region in regions for name in (_NODE_CERT, _NODE_KEY)]
    existing = [path for path in paths if path.exists()]
    if existing:
        raise ConfigError(
            f"{existing[0]} is there already, and certificates are never overwritten: "
            "a run with new ones is another run. Name another folder, or remove this one by hand."
        )
    now = now or dt.datetime.now(dt.UTC)
    try:
        _write_run(folder, run_id, regions, now)
    except OSError as error:
        raise ConfigError(f"certificates can't be written to {folder}: {error.strerror or error}") from error


def _check_names(run_id: str, regions: Sequence[str]) -> None:
    if not regions:
        raise ConfigError("no regions: name at least one to make certificates for")
    for kind, name in [("run id", run_id), *(("region", region) for region in regions)]:
        if not is_region_name(name):
            raise ConfigError(f"{kind} {name!a}: use 1 to 63 of a-z, 0-9 and '-'")
    if len(set(regions)) != len(regions):
        raise ConfigError("a region is named twice: every region needs a name of its own")


def _write_run(folder: Path, run_id: str, regions: Sequence[str], now: dt.datetime) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_cert = _ca_certificate(ca_key, run_id, now)
    ca_pem = ca_cert.public_bytes(serialization.Encoding.PEM)
    _write_new(folder / _CA_KEY, key_pem(ca_key), mode=0o600)
    _write_new(folder / _CA_CERT, ca_pem, mode=0o644)
    for region in regions:
        key = ec.generate_private_key(ec.SECP256R1())
        cert = node_certificate(key, region, run_id, ca_key, ca_cert, now=now)
        region_folder = folder / region
        region_folder.mkdir(mode=0o700, exist_ok=True)
        _write_new(region_folder / _NODE_KEY, key_pem(key), mode=0o600)
        _write_new(region_folder / _NODE_CERT, cert.public_bytes(serialization.Encoding.PEM), mode=0o644)
        (region_folder / _CA_CERT).write_bytes(ca_pem)


def _write_new(path: Path, data: bytes, *, mode: int) -> None:
    """Write a file that must not exist; a key is never readable by others, not even for a moment."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as PEM, not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _ca_certificate(key: ec.EllipticCurvePrivateKey, run_id: str, now: dt.datetime) -> x509.Certificate:
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "diloco-node"),
            x509.NameAttribute(NameOID.COMMON_NAME, f"{run_id[:48]} authority"),
        ]
    )
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(now + dt.timedelta(days=CA_VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_ca=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def node_certificate(
    key: ec.EllipticCurvePrivateKey,
    region: str,
    run_id: str,
    ca_key: ec.EllipticCurvePrivateKey,
    ca_cert: x509.Certificate,
    *,
    now: dt.datetime,
) -> x509.Certificate:
    """Return a region's certificate, signed by the authority of the run."""
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, region)]))
        .issuer_name(ca_cert.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(now + dt.timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(is_ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(tls_name(region, run_id))]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _key_usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def load_identity(
    folder: Path, *, region: str | None = None, run_id: str | None = None, now: dt.datetime | None = None
) -> Identity:
    """Read a region's folder and check that it will be accepted.

    Args:
        folder: with `ca.pem`, `node.pem`, `node.key`, as `init_run` makes it per region.
        region, run_id: what the settings say; not compared when None.
        now: the time to check validity against; the clock's when None.

    Raises:
        IdentityError: a file is missing or unreadable, the certificate is expired, not yet valid, for another region
            or run, not signed by the authority, or the key is another one. The message says what to do.
    """
    ca_pem, cert_pem, key_pem = (_read(folder / name) for name in (_CA_CERT, _NODE_CERT, _NODE_KEY))
    cert = _certificate(cert_pem, folder / _NODE_CERT)
    ca_cert = _certificate(ca_pem, folder / _CA_CERT)
    _check_key(cert, key_pem, folder)
    _check_issuer(cert, ca_cert, folder)
    now = now or dt.datetime.now(dt.UTC)
    for certificate, name in ((cert, _NODE_CERT), (ca_cert, _CA_CERT)):
        _check_dates(certificate, folder / name, now)
    found_region, found_run = _names(cert, folder / _NODE_CERT)
    for kind, expectation, certificate_name in (("region", region, found_region), ("run", run_id, found_run)):
        if expectation is not None and expectation != certificate_name:
            raise IdentityError(
                f"{folder / _NODE_CERT} is for {kind} {certificate_name}, this node is {kind} {expectation}: "
                f"use the folder that `diloco-node certs init` made for {expectation}"
            )
    return Identity(found_region, found_run, ca_pem, cert_pem, key_pem, cert.not_valid_after_utc)


def _read(path: Path) -> bytes:
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


def _certificate(pem: bytes, path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise IdentityError(f"{path} holds no certificate in PEM form: copy it again from where it was made") from None


def _check_key(cert: x509.Certificate, key_pem: bytes, folder: Path) -> None:
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError):
        raise IdentityError(f"{folder / _NODE_KEY} holds no unencrypted key in PEM form: copy it again") from None
    if key.public_key() != cert.public_key():
        raise IdentityError(
            f"{folder / _NODE_KEY} is not the key of {folder / _NODE_CERT}: copy both files from the same folder"
        )


def _check_issuer(cert: x509.Certificate, ca_cert: x509.Certificate, folder: Path) -> None:
    try:
        cert.verify_directly_issued_by(ca_cert)
    except (ValueError, TypeError, InvalidSignature):
        raise IdentityError(
            f"{folder / _NODE_CERT} was not signed by {folder / _CA_CERT}: they are from two runs; "
            "copy the region's whole folder from one `diloco-node certs init`"
        ) from None


def _check_dates(cert: x509.Certificate, path: Path, now: dt.datetime) -> None:
    if now > cert.not_valid_after_utc:
        raise IdentityError(
            f"{path} expired on {cert.not_valid_after_utc:%Y-%m-%d %H:%M} UTC and it is {now:%Y-%m-%d %H:%M}: "
            "make new certificates with `diloco-node certs init` (or set this machine's clock)"
        )
    if now < cert.not_valid_before_utc:
        raise IdentityError(
            f"{path} is valid from {cert.not_valid_before_utc:%Y-%m-%d %H:%M} UTC and it is {now:%Y-%m-%d %H:%M}: "
            "set this machine's clock"
        )


def _names(cert: x509.Certificate, path: Path) -> tuple[str, str]:
    """Region and run id that a node's certificate names, in both places alike."""
    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        dns = names.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        dns = []
    common = [str(attribute.value) for attribute in cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    labels = dns[0].split(".") if len(dns) == 1 else []
    if len(labels) != 3 or labels[2] != "diloco" or common != [labels[0]] or not is_region_name(labels[0]):
        raise IdentityError(f"{path} is no node certificate of diloco-node: make one with `diloco-node certs init`")
    return labels[0], labels[1]
