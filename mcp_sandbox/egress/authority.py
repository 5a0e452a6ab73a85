"""The certificate authority of opened TLS, and the authorities that are trusted outside.

Its key stays in its folder; sandboxes get a folder with one file, the certificates that programs
inside trust. Leaves are in memory only.
"""

import hashlib
import hmac
import os
import re
import ssl
from collections import OrderedDict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import certifi
from anyio import to_thread
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mcp_sandbox.durable import locked, make_folder, write_file
from mcp_sandbox.errors import ConfigError, StorageUnavailable

_LIFETIME, _RENEWED_BEFORE = timedelta(days=400), timedelta(days=30)
# A clock inside may be a little late.
_BEFORE = timedelta(days=1)
_MOST_LEAVES = 256
_BUNDLE = "ca-certificates.crt"
_CERTIFICATE = re.compile(
    rb"-----BEGIN CERTIFICATE-----\s[\w\s+/=]+-----END CERTIFICATE-----", re.ASCII
)
_PEM = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


class Authority:
    """The authority of one data root. `bundle` is the folder to mount over /etc/ssl/certs."""

    def __init__(self, folder: Path, trusted: bytes) -> None:
        self.bundle = folder / "bundle"
        self._folder = folder
        self._trusted = trusted
        self._outside = _client_context(trusted)
        self._leaves: OrderedDict[str, ssl.SSLContext] = OrderedDict()
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        with locked(folder / "lock"):
            self._key = self._own_key()
            self._certificate = self._renewed()
        secret = self._key.private_bytes(Encoding.DER, *_PEM[1:])
        self.seed = hmac.digest(secret, b"placeholders of secrets", hashlib.sha256)

    @classmethod
    async def open(cls, folder: Path, ca_bundle: Path | None) -> "Authority":
        """Return the authority kept in a folder, made or renewed if need be.

        Raises:
            ConfigError: `ca_bundle` or a file of the authority cannot be used.
            StorageUnavailable: the folder cannot be written.
        """

        def opened() -> Authority:
            certificates = trusted(ca_bundle)
            make_folder(folder / "bundle")
            return cls(folder, certificates)

        try:
            return await to_thread.run_sync(opened)
        except OSError as exc:
            raise StorageUnavailable(f"the folder {folder} cannot be used: {exc}") from exc

    async def context_for(self, host: str) -> ssl.SSLContext:
        """Return what a server of this host's name speaks TLS with. Raises OSError."""
        if (context := self._leaves.get(host)) and not _ends_soon(self._certificate):
            self._leaves.move_to_end(host)
            return context
        context = self._leaves[host] = await to_thread.run_sync(self._server_context, host)
        while len(self._leaves) > _MOST_LEAVES:
            self._leaves.popitem(last=False)
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return what to speak TLS to the outside with."""
        return self._outside

    def _own_key(self) -> ec.EllipticCurvePrivateKey:
        file = self._folder / "key.pem"
        if not file.exists():
            write_file(file, ec.generate_private_key(ec.SECP256R1()).private_bytes(*_PEM))
        try:
            key = load_pem_private_key(file.read_bytes(), None)
        except (ValueError, TypeError) as exc:
            raise _damaged(file) from exc
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise _damaged(file)
        return key

    def _renewed(self) -> x509.Certificate:
        """The certificate, made anew when it ends soon, in the bundle with all that is trusted."""
        file, bundle = self._folder / "certificate.pem", self.bundle / _BUNDLE
        try:
            certificate = x509.load_pem_x509_certificate(file.read_bytes())
        except (FileNotFoundError, ValueError):
            certificate = None
        mine = self._key.public_key()
        if not certificate or certificate.public_key() != mine or _ends_soon(certificate):
            # With the same key and name, so that what was signed before stays good.
            certificate = _certificate(self._key)
            write_file(file, certificate.public_bytes(Encoding.PEM))
        whole = self._trusted + b"\n" + certificate.public_bytes(Encoding.PEM)
        if not bundle.exists() or bundle.read_bytes() != whole:
            write_file(bundle, whole)
        # Whatever the umask is: every sandbox user reads it.
        bundle.chmod(0o644)
        self.bundle.chmod(0o755)
        return certificate

    def _server_context(self, host: str) -> ssl.SSLContext:
        if _ends_soon(self._certificate):
            with locked(self._folder / "lock"):
                self._certificate = self._renewed()
            self._leaves.clear()
        leaf = _certificate(self._key, host, self._leaf_key, self._certificate.not_valid_after_utc)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        # The library reads files alone; this one is in memory.
        descriptor = os.memfd_create("leaf", os.MFD_CLOEXEC)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(self._leaf_key.private_bytes(*_PEM))
            stream.write(leaf.public_bytes(Encoding.PEM))
            stream.flush()
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        return context


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    host: str = "",
    leaf_key: ec.EllipticCurvePrivateKey | None = None,
    end: datetime | None = None,
) -> x509.Certificate:
    """The authority's own, or that of a host, signed by `key`."""
    now, own, owner = datetime.now(UTC), leaf_key is None, (leaf_key or key).public_key()
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mcp-sandbox allowed hosts")])
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=own, path_length=0 if own else None), True),
        (x509.SubjectKeyIdentifier.from_public_key(owner), False),
        (_usage(signs_certificates=own), True),
    ]
    if not own:
        extensions += [
            # The name is there alone: a subject holds 64 characters at most.
            (x509.SubjectAlternativeName([x509.DNSName(host)]), True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False),
        ]
    builder = (
        x509.CertificateBuilder()
        .subject_name(authority if own else x509.Name([]))
        .issuer_name(authority)
        .public_key(owner)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(end or now + _LIFETIME)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(key, SHA256())


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    no = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
        **dict.fromkeys(no, False),
    )


def _ends_soon(certificate: x509.Certificate) -> bool:
    return certificate.not_valid_after_utc - datetime.now(UTC) < _RENEWED_BEFORE


def trusted(ca_bundle: Path | None) -> bytes:
    """Return the certificates of the authorities that are trusted outside. Raises ConfigError."""
    found = _machine_bundle()
    if ca_bundle is not None:
        found += b"\n" + _certificates(ca_bundle, "egress.ca_bundle")
    return found


def _machine_bundle() -> bytes:
    """What this machine trusts; Debian's Python knows only the folder of its bundle."""
    paths = ssl.get_default_verify_paths()
    for file in (paths.cafile, paths.capath and f"{paths.capath}/{_BUNDLE}"):
        if file and Path(file).is_file():
            return _certificates(Path(file), "this machine's bundle")
    return _certificates(Path(certifi.where()), "certifi's bundle")


def _certificates(file: Path, what: str) -> bytes:
    """The certificates of a bundle, without the words between them."""
    try:
        found = b"\n".join(_CERTIFICATE.findall(file.read_bytes()))
    except OSError as exc:
        raise ConfigError(f"{what} {file} cannot be read ({exc.strerror}): name another") from exc
    if not found:
        raise ConfigError(f"{what} {file} holds no certificate: name a file in PEM form")
    return found


def _client_context(trusted: bytes) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cadata=trusted.decode("ascii"))
    except ssl.SSLError as exc:
        raise ConfigError(
            f"a certificate that this machine or egress.ca_bundle trusts is damaged: {exc.reason}"
        ) from exc
    context.set_alpn_protocols(["http/1.1"])
    return context


def _damaged(file: Path) -> ConfigError:
    return ConfigError(f"{file} is damaged: move it away, and a new authority is made")
