"""The certificate authority of the TLS that the proxy terminates, and the trusted authorities.

Its key stays in its folder. Sandboxes get a folder with one file: the certificates to trust.
"""

import hashlib
import hmac
import ssl
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

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
from mcp_sandbox.egress.settings import BUNDLE, load_trusted
from mcp_sandbox.errors import ConfigError, StorageUnavailable

_LIFETIME, _RENEWED_BEFORE = timedelta(days=400), timedelta(days=30)
_MOST_LEAVES = 256
_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mcp-sandbox allowed hosts")])


class CertificateAuthority:
    """The authority kept in a folder.

    `bundle` is the folder to mount over /etc/ssl/certs, `trusted` are the certificates of real
    servers' authorities, `seed` is a secret that lasts as long as the folder, or is that of all
    authorities of the same `shared` secret: what one has signed, sandboxes of another trust.
    """

    def __init__(self, folder: Path, ca_bundle: Path | None, shared: str = "") -> None:
        self.trusted = load_trusted(ca_bundle)
        ssl.create_default_context(cadata=self.trusted.decode("ascii"))
        self.bundle = folder / "bundle"
        self._folder = folder
        self._shared = shared.encode()
        self._leaves = lru_cache(_MOST_LEAVES)(self._leaf)
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        make_folder(self.bundle)
        self._renew()
        self.seed = hmac.digest(_pem(self._key), b"placeholders of secrets", hashlib.sha256)

    @classmethod
    async def open(
        cls, folder: Path, ca_bundle: Path | None, shared: str = ""
    ) -> "CertificateAuthority":
        """Return the authority of a folder, made or renewed if need be.

        Raises:
            ConfigError: `ca_bundle`, or a file in the folder, is damaged.
            StorageUnavailable: the folder cannot be used.
        """
        try:
            return await to_thread.run_sync(cls, folder, ca_bundle, shared)
        except ssl.SSLError as exc:
            raise ConfigError(f"a trusted certificate is damaged: {exc.reason}") from exc
        except OSError as exc:
            raise StorageUnavailable(f"the folder {folder} cannot be used: {exc}") from exc

    async def leaf(self, host: str) -> bytes:
        """Return what it takes to act as the server of this name, in PEM form. Raises OSError."""
        if _ends_soon(self._certificate):
            await to_thread.run_sync(self._renew)
        return await to_thread.run_sync(self._leaves, host)

    def _own_key(self) -> ec.EllipticCurvePrivateKey:
        if self._shared:
            number = int.from_bytes(hmac.digest(self._shared, b"authority", "sha256"))
            # One bit less, for the order of the curve is no power of two.
            return ec.derive_private_key(number >> 1, ec.SECP256R1())
        file = self._folder / "key.pem"
        if not file.exists():
            write_file(file, _pem(ec.generate_private_key(ec.SECP256R1())))
        with suppress(ValueError):
            key = load_pem_private_key(file.read_bytes(), None)
            if isinstance(key, ec.EllipticCurvePrivateKey):
                return key
        raise ConfigError(f"{file} is damaged: move it away, and a new one will be made")

    def _renew(self) -> None:
        """Make a certificate unless one is valid for long, and put it into the bundle."""
        file, bundle, found = self._folder / "certificate.pem", self.bundle / BUNDLE, None
        with locked(self._folder / "lock"):
            self._key = self._own_key()
            with suppress(FileNotFoundError, ValueError):
                found = x509.load_pem_x509_certificate(file.read_bytes())
            if not found or found.public_key() != self._key.public_key() or _ends_soon(found):
                # It has the same key and name, so it also verifies what the last one signed.
                found = _certificate(self._key)
                write_file(file, found.public_bytes(Encoding.PEM))
            whole = self.trusted + found.public_bytes(Encoding.PEM)
            if not bundle.exists() or bundle.read_bytes() != whole:
                write_file(bundle, whole)
            # Every sandbox user must be able to read it, whatever the umask is.
            bundle.chmod(0o644)
            self.bundle.chmod(0o755)
        self._certificate = found
        self._leaves.cache_clear()

    def _leaf(self, host: str) -> bytes:
        leaf = _certificate(self._key, host, self._leaf_key)
        return _pem(self._leaf_key) + leaf.public_bytes(Encoding.PEM)


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    host: str = "",
    leaf_key: ec.EllipticCurvePrivateKey | None = None,
) -> x509.Certificate:
    """Return the authority's certificate, or one of a host, signed by `key`."""
    own, owner, now = leaf_key is None, (leaf_key or key).public_key(), datetime.now(UTC)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    usage = x509.KeyUsage(not own, False, False, False, False, own, own, False, False)
    builder = (
        x509.CertificateBuilder(_NAME, _NAME if own else x509.Name([]), owner)
        .serial_number(x509.random_serial_number())
        # The clock of a remote engine may be late.
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.BasicConstraints(own, 0 if own else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(owner), critical=False)
        .add_extension(issuer, critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(usage, critical=True)
    )
    if not own:
        # The name is only here: a subject holds at most 64 characters.
        name = x509.SubjectAlternativeName([x509.DNSName(host)])
        builder = builder.add_extension(name, critical=True)
    return builder.sign(key, SHA256())


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _ends_soon(certificate: x509.Certificate) -> bool:
    return certificate.not_valid_after_utc - datetime.now(UTC) < _RENEWED_BEFORE
