"""Who belongs to a job: mutual TLS from one secret, without key files or a certificate authority.

Every process of a job derives the same P-256 authority key from the secret and the job id
(HKDF-SHA256, RFC 5869; the scalar as in FIPS 186-5, A.2.1), makes itself a leaf certificate for a few days
and signs it. A peer is believed when its leaf is signed by that key, so only holders of the secret get
through the handshake, and an agent of another job does not. Leaves say whether they serve or call: a caller's
leaf cannot pose as the master. The host name in the address is not checked (agents reach a master by many
names); a fixed name in the leaf is.

The secret is read from a file, a file descriptor or a variable, never from the command line, and is in no
message, log or `repr`.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import os
import secrets
import ssl
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from aimaster.errors import CredentialsMissing, FolderUnusable
from aimaster.ids import JobId

SECRET_VARIABLE = "AIMASTER_JOB_SECRET"
SECRET_BYTES_MIN = 16
"""Shorter secrets could be guessed from a recorded handshake."""
SECRET_BYTES_MAX = 64 * 1024
SECRET_FILE_NAME = "secret"
NEW_SECRET_BYTES = 32

SERVER_NAME = "master.aimaster.internal"
LEAF_LIFE = datetime.timedelta(days=7)
LEAF_RENEWAL = datetime.timedelta(days=1)
"""A leaf older than this is replaced at the next handshake, so that none expires in a long job."""
CLOCK_SKEW = datetime.timedelta(days=2)
"""How wrong the clock of a node may be before its leaf is not believed."""

_HKDF_SALT = b"aimaster/v1 job authority"
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_AUTHORITY_FROM = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
_AUTHORITY_UNTIL = datetime.datetime(2120, 1, 1, tzinfo=datetime.timezone.utc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """What the members of a job share. `source` says where it came from, for messages."""

    value: bytes = field(repr=False)
    source: str

    def __post_init__(self) -> None:
        if not SECRET_BYTES_MIN <= len(self.value) <= SECRET_BYTES_MAX:
            raise CredentialsMissing(
                f"the job secret has {len(self.value)} bytes, need {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}",
                where=self.source,
                next_step=NEW_SECRET_HINT,
            )


NEW_SECRET_HINT = "make one with: head -c 32 /dev/urandom | base64 > SECRET_FILE && chmod 600 SECRET_FILE"


class Credentials:
    """How connections of one job are protected. Thread-safe; derive once per process and pass it in."""

    def __init__(self, authority: _Authority | None) -> None:
        self._authority = authority
        self._server_leaf: _Leaf | None = None
        self._client_leaf: _Leaf | None = None

    @classmethod
    def from_secret(cls, secret: Secret | bytes, *, job: JobId) -> Credentials:
        """Mutual TLS for the holders of `secret` in `job`."""
        value = secret.value if isinstance(secret, Secret) else secret
        return cls(_Authority.derive(value, job))

    @classmethod
    def insecure(cls) -> Credentials:
        """Plain connections that prove nothing; only where the user agreed to it, or on loopback in tests."""
        return cls(None)

    @property
    def is_secure(self) -> bool:
        """Whether peers prove that they hold the secret."""
        return self._authority is not None

    def server(self) -> grpc.ServerCredentials | None:
        """For a gRPC server; None means an insecure port."""
        if self._authority is None:
            return None
        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(),
            self._server_configuration_if_old,  # type: ignore[arg-type]  # the stubs forget None
            require_client_authentication=True,
        )

    def client(self) -> grpc.ChannelCredentials | None:
        """For a new gRPC channel; None means an insecure one."""
        if self._authority is None:
            return None
        if self._client_leaf is None or self._client_leaf.is_old:
            self._client_leaf = self._authority.leaf(ExtendedKeyUsageOID.CLIENT_AUTH)
        leaf = self._client_leaf
        return grpc.ssl_channel_credentials(self._authority.certificate, leaf.key, leaf.certificate)

    def verifying_context(self) -> ssl.SSLContext | None:
        """A context that believes servers of this job only, for finding out why a handshake failed."""
        if self._authority is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols(["h2"])
        context.load_verify_locations(cadata=self._authority.certificate.decode())
        return context

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        assert self._authority is not None
        leaf = self._authority.leaf(ExtendedKeyUsageOID.SERVER_AUTH)
        self._server_leaf = leaf
        return grpc.ssl_server_certificate_configuration(
            [(leaf.key, leaf.certificate)], root_certificates=self._authority.certificate
        )

    def _server_configuration_if_old(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC at every handshake, on one of its threads; None keeps the present one."""
        if self._server_leaf is not None and not self._server_leaf.is_old:
            return None
        return self._server_configuration()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """PEM texts of one leaf."""

    key: bytes = field(repr=False)
    certificate: bytes
    made_at: datetime.datetime

    @property
    def is_old(self) -> bool:
        return _utc_now() - self.made_at > LEAF_RENEWAL


@dataclass(frozen=True, slots=True, kw_only=True)
class _Authority:
    """The key that every member derives, and a certificate of it (PEM)."""

    key: ec.EllipticCurvePrivateKey = field(repr=False)
    name: x509.Name
    certificate: bytes

    @classmethod
    def derive(cls, secret: bytes, job: JobId) -> _Authority:
        # 16 bytes more than the order has, so that the remainder is not biased.
        kdf = HKDF(algorithm=hashes.SHA256(), length=48, salt=_HKDF_SALT, info=job.encode())
        scalar = int.from_bytes(kdf.derive(secret), "big") % (_P256_ORDER - 1) + 1
        key = ec.derive_private_key(scalar, ec.SECP256R1())
        label = hashlib.sha256(job.encode()).hexdigest()[:16]
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"aimaster job {label}")])
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=False,
            encipher_only=False, decipher_only=False,
        )  # fmt: skip
        certificate = (
            _builder(name, name, key.public_key(), _AUTHORITY_FROM, _AUTHORITY_UNTIL)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key=key, name=name, certificate=certificate.public_bytes(serialization.Encoding.PEM))

    def leaf(self, usage: x509.ObjectIdentifier) -> _Leaf:
        """A new key and a certificate for it, good for one direction."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"aimaster process {os.getpid()}")])
        now = _utc_now()
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = (
            _builder(subject, self.name, key.public_key(), now - CLOCK_SKEW, now + LEAF_LIFE)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(authority, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return _Leaf(
            key=key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
            certificate=certificate.public_bytes(serialization.Encoding.PEM),
            made_at=now,
        )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    not_before: datetime.datetime,
    not_after: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(not_before)
        .not_valid_after(not_after)
    )


def _utc_now() -> datetime.datetime:
    # Certificates are about the calendar, so wall time it is, and no injected clock.
    return datetime.datetime.now(datetime.timezone.utc)


def load_secret(
    *, secret_file: Path | None, environ: Mapping[str, str], run_dir: Path | None = None
) -> Secret | None:
    """The job's secret: the file given, else the variable, else the one in the run folder, else None.

    Surrounding white space is not part of a secret, so that one made with `echo` equals one made without.

    Raises:
        CredentialsMissing: if a file that was asked for cannot be read, or the secret is too short.
    """
    if secret_file is not None:
        return read_secret_file(secret_file)
    if environ.get(SECRET_VARIABLE):
        value = os.fsencode(environ[SECRET_VARIABLE]).strip()
        return Secret(value=value, source=f"${SECRET_VARIABLE}")
    if run_dir is not None and (run_dir / SECRET_FILE_NAME).exists():
        return read_secret_file(run_dir / SECRET_FILE_NAME)
    return None


def read_secret_file(path: Path) -> Secret:
    """Read a secret; one that every user of the machine can read is warned about, not refused.

    (Kubernetes mounts secrets world-readable unless told otherwise.)
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IROTH:
                print(f"aimaster: warning: any user can read {path}; chmod 600 it", file=sys.stderr)
            value = file.read(SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise CredentialsMissing(
            f"the job secret cannot be read ({error.strerror})", where=str(path), next_step=NEW_SECRET_HINT
        ) from error
    return Secret(value=value.strip(), source=str(path))


def read_secret_fd(fd: int) -> Secret:
    """Read a secret from an inherited descriptor until its end, and close it."""
    with os.fdopen(fd, "rb") as file:
        return Secret(value=file.read(SECRET_BYTES_MAX + 1).strip(), source=f"descriptor {fd}")


def make_secret_file(folder: Path) -> Path:
    """Make a new random secret in `folder`, readable by its owner only, or keep the one that is there.

    Safe against another process that does the same at the same time: both end with the same file.

    Raises:
        FolderUnusable: if it cannot be written.
    """
    path = folder / SECRET_FILE_NAME
    draft = folder / f".{SECRET_FILE_NAME}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(NEW_SECRET_BYTES) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "unknown error")
        raise FolderUnusable(f"cannot write the job secret ({name})", where=str(folder)) from error
    return path
