"""The authority of a run, in the folder of its holder: regions are added, certificates renewed, the authority replaced.

The folder has `ca.pem`, `ca.key`, and for each region NAME a subfolder with `ca.pem`, `node.pem` and `node.key`, which
goes to that region. An authority is replaced in three steps, none of which stops a run. First `ca.pem` holds both, and
goes to all regions. Then every certificate is renewed, by the new one. At last the old one is dropped. A crash between
two files leaves a folder in which a region does not start, and that the same command mends.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from diloco_node.atomic_file import replace_file
from diloco_node.core.shapes import REGION_NAMES, is_region_name
from diloco_node.errors import ConfigError, IdentityError
from diloco_node.transport.certificates import (
    CA_CERT,
    CA_KEY,
    NODE_CERT,
    NODE_KEY,
    SIGNATURE,
    issuer_of,
    names_of,
    parse_certificates,
    read_pem,
    tls_name,
)

VALID: Final = dt.timedelta(days=365)
CA_VALID: Final = dt.timedelta(days=3650)

CLOCK_SLACK: Final = dt.timedelta(hours=1)
"""Certificates begin an hour before they are made, for machines whose clocks are behind."""

PREVIOUS_CERT: Final = "node.pem.old"
"""The certificate that the last renewal replaced: `certs revoke --certificate` takes it. Its key is gone."""

_RUN_ID_SHOWN: Final = 48
"""Characters of the run id in an authority's name, which may have 64."""


@dataclass(frozen=True, slots=True)
class _Authority:
    """The authority in a folder. `certificates`: its own first, then the one that it replaces."""

    folder: Path
    key: ec.EllipticCurvePrivateKey
    certificates: tuple[x509.Certificate, ...]

    @property
    def name(self) -> str:
        """The common name."""
        return str(self.certificates[0].subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)

    @property
    def pem(self) -> bytes:
        """The bytes of `ca.pem`."""
        return b"".join(map(_pem, self.certificates))

    def regions(self) -> list[str]:
        """The regions that have a certificate here."""
        return sorted(path.parent.name for path in self.folder.glob(f"*/{NODE_CERT}"))


def init_run(folder: Path, run_id: str, regions: Sequence[str], *, now: dt.datetime | None = None) -> None:
    """Make a run's authority and one certificate per region, each in a subfolder of its own that goes to the region.

    Keys are readable by their owner only; `ca.key` can make new members, so it should leave the machines that train.

    Raises ConfigError: a bad name, or some of the files are there already (nothing is overwritten).
    """
    _check_names(run_id, regions)
    _check_absent([folder / CA_CERT, folder / CA_KEY, *_region_files(folder, regions)])
    now = now or dt.datetime.now(dt.UTC)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        authority = _Authority(folder, key, (_ca_certificate(key, run_id, now),))
        _replace(folder / CA_KEY, key_pem(key), mode=0o600)
        _replace(folder / CA_CERT, authority.pem)
        for region in regions:
            _issue(authority, region, run_id, now, VALID)


def add_regions(
    folder: Path, regions: Sequence[str], *, run_id: str | None = None, now: dt.datetime | None = None
) -> None:
    """Make certificates for further regions. run_id: None: as the authority's name has it.

    Raises ConfigError: a bad name; a region has files already; the key of the authority is not there, or does not fit;
    the authority is of another run, or over.
    """
    now = now or dt.datetime.now(dt.UTC)
    authority = _load_authority(folder, now)
    run_id = run_id if run_id is not None else _run_id_of(authority)
    _check_names(run_id, regions)
    if authority.name != _ca_name(run_id):
        raise ConfigError(f"{folder / CA_CERT} is the {authority.name}, not that of run {run_id}: name its folder")
    _check_absent(_region_files(folder, regions))
    with _writing(folder):
        for region in regions:
            _issue(authority, region, run_id, now, VALID)


def renew_regions(
    folder: Path, regions: Sequence[str] = (), *, now: dt.datetime | None = None, valid: dt.timedelta = VALID
) -> list[str]:
    """Give regions, all where none is named, another key and certificate. Returns the names, sorted.

    Raises ConfigError: a region has no certificate here, the authority's key is missing or does not fit, or it is over.
    """
    now = now or dt.datetime.now(dt.UTC)
    authority = _load_authority(folder, now)
    names = sorted(set(regions)) or authority.regions()
    run_ids = {name: _run_id_in(folder, name) for name in names}
    with _writing(folder):
        for name, run_id in run_ids.items():
            _replace(folder / name / PREVIOUS_CERT, read_pem(folder / name / NODE_CERT))
            _issue(authority, name, run_id, now, valid)
    return names


def renew_authority(folder: Path, *, now: dt.datetime | None = None) -> list[str]:
    """Make a new authority beside the old one, whose key is gone then. Both are trusted where the new `ca.pem` is.

    Returns: the regions that get the new `ca.pem`, sorted. Raises ConfigError: the key is not there, or does not fit;
    an older authority is not dropped yet.
    """
    now = now or dt.datetime.now(dt.UTC)
    old = _load_authority(folder, None)
    if len(old.certificates) > 1:
        raise ConfigError(
            f"{folder / CA_CERT} holds an older authority still: when all regions have certificates of the newer one, "
            "drop it with `diloco-node certs renew --drop-old-ca`"
        )
    run_id = _run_id_in(folder, old.regions()[0]) if old.regions() else _run_id_of(old)
    key = ec.generate_private_key(ec.SECP256R1())
    authority = _Authority(folder, key, (_ca_certificate(key, run_id, now), *old.certificates))
    with _writing(folder):
        _replace(folder / CA_CERT, authority.pem)
        _replace(folder / CA_KEY, key_pem(key), mode=0o600)
        return _hand_out(authority)


def drop_old_authority(folder: Path) -> list[str]:
    """Trust the newest authority only; the regions that get its `ca.pem`. Raises ConfigError: not possible yet."""
    authority = _load_authority(folder, None)
    newest, *older = authority.certificates
    if not older:
        raise ConfigError(f"{folder / CA_CERT} holds one authority only: there is none to drop")
    certificates = {
        name: parse_certificates(read_pem(folder / name / NODE_CERT), folder / name / NODE_CERT)[0]
        for name in authority.regions()
    }
    late = [name for name, certificate in certificates.items() if issuer_of(certificate, (newest,)) is None]
    if late:
        raise ConfigError(
            f"certificates of {', '.join(late)} are by the old authority: renew them with `diloco-node certs renew "
            f"{' '.join(late)}`, and bring them to their regions, before it is dropped"
        )
    authority = _Authority(folder, authority.key, (newest,))
    with _writing(folder):
        _replace(folder / CA_CERT, authority.pem)
        return _hand_out(authority)


def sign(key_file: Path, statement: bytes) -> bytes:
    """Sign a statement with the key of an authority: `ca.key`. Raises ConfigError: it can't be read."""
    return _load_key(key_file).sign(statement, SIGNATURE)


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    if not path.exists():
        raise ConfigError(
            f"{path} is missing: only the holder of the authority's key makes certificates, and changes the members of "
            "a run. Give the command there, in the folder of `certs init`, or name it with --out FOLDER (--ca-key FILE)"
        )
    try:
        key = serialization.load_pem_private_key(read_pem(path), password=None)
    except IdentityError as error:
        raise ConfigError(str(error)) from error
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} holds no unencrypted key of an elliptic curve in PEM form: take it from your backup")
    return key


def _load_authority(folder: Path, now: dt.datetime | None) -> _Authority:
    """Read key and certificates. `now`: the authority must be valid then; None: it need not be. Raises ConfigError."""
    path = folder / CA_KEY
    key = _load_key(path)
    try:
        certificates = parse_certificates(read_pem(folder / CA_CERT), folder / CA_CERT)
    except IdentityError as error:
        raise ConfigError(str(error)) from error
    own = [certificate for certificate in certificates if certificate.public_key() == key.public_key()]
    if not own:
        raise ConfigError(f"{path} is not the key of {folder / CA_CERT}: both must be of one `certs init`")
    others = [certificate for certificate in certificates if certificate not in own]
    if now is not None and now > own[0].not_valid_after_utc:
        raise ConfigError(
            f"{folder / CA_CERT} expired on {own[0].not_valid_after_utc:%Y-%m-%d %H:%M} UTC: make another authority "
            "with `diloco-node certs renew --ca` (or set this machine's clock)"
        )
    return _Authority(folder, key, (own[0], *others))


def _run_id_of(authority: _Authority) -> str:
    name = authority.name.removesuffix(" authority")
    if len(name) >= _RUN_ID_SHOWN:
        raise ConfigError(f"the run's name is longer than {name}: give it with --run-id")
    return name


def _run_id_in(folder: Path, region: str) -> str:
    """Return the run id that a region's certificate names, which must be the region's. Raises ConfigError."""
    path = folder / region / NODE_CERT
    if not path.exists():
        raise ConfigError(f"{path} is missing: make the first certificate of {region} with `diloco-node certs add`")
    try:
        name, run_id = names_of(parse_certificates(read_pem(path), path)[0], path)
    except IdentityError as error:
        raise ConfigError(str(error)) from error
    if name != region:
        raise ConfigError(f"{path} is the certificate of {name}: a folder has the name of its region")
    return run_id


def _check_names(run_id: str, regions: Sequence[str]) -> None:
    if not regions:
        raise ConfigError("no regions: name at least one to make certificates for")
    for kind, name in [("run id", run_id), *(("region", region) for region in regions)]:
        if not is_region_name(name):
            raise ConfigError(f"{kind} {name!a}: use {REGION_NAMES}")
    if len(set(regions)) != len(regions):
        raise ConfigError("a region is named twice: every region needs a name of its own")


def _region_files(folder: Path, regions: Sequence[str]) -> list[Path]:
    return [folder / region / name for region in regions for name in (NODE_CERT, NODE_KEY)]


def _check_absent(paths: Sequence[Path]) -> None:
    existing = [path for path in paths if path.exists()]
    if existing:
        raise ConfigError(
            f"{existing[0]} is there already, and is not overwritten: `diloco-node certs renew` gives a region "
            "another certificate, `certs add` makes one for another region. A new run needs another folder."
        )


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"certificates can't be written to {folder}: {error.strerror or error}") from error


def _replace(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    replace_file(path, data, is_durable=True, mode=mode)


def _hand_out(authority: _Authority) -> list[str]:
    regions = authority.regions()
    for region in regions:
        _replace(authority.folder / region / CA_CERT, authority.pem)
    return regions


def _issue(authority: _Authority, region: str, run_id: str, now: dt.datetime, valid: dt.timedelta) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    cert = node_certificate(key, region, run_id, authority.key, authority.certificates[0], now=now, valid=valid)
    folder = authority.folder / region
    folder.mkdir(mode=0o700, exist_ok=True)
    _replace(folder / NODE_KEY, key_pem(key), mode=0o600)
    _replace(folder / NODE_CERT, _pem(cert))
    _replace(folder / CA_CERT, authority.pem)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as PEM, not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _ca_certificate(key: ec.EllipticCurvePrivateKey, run_id: str, now: dt.datetime) -> x509.Certificate:
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "diloco-node"),
            x509.NameAttribute(NameOID.COMMON_NAME, _ca_name(run_id)),
        ]
    )
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(now + CA_VALID)
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
    valid: dt.timedelta = VALID,
) -> x509.Certificate:
    """Return a region's certificate, signed by the authority of the run, and good for no longer than that."""
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, region)]))
        .issuer_name(ca_cert.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(min(now + valid, ca_cert.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(is_ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(tls_name(region, run_id))]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _ca_name(run_id: str) -> str:
    return f"{run_id[:_RUN_ID_SHOWN]} authority"


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
