"""The authority of opened TLS, as files on the disk and as clients see it."""

import os
import ssl
import stat
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from mcp_sandbox.egress.authority import CertificateAuthority
from mcp_sandbox.egress.process.keeper import Keeper
from mcp_sandbox.egress.settings import load_trusted
from mcp_sandbox.egress.targets import Target
from mcp_sandbox.errors import ConfigError, StorageUnavailable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "authority"


@pytest.fixture
def closed_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    found = [folder, *folder.rglob("*")]
    return {str(each.relative_to(folder)): stat.S_IMODE(each.stat().st_mode) for each in found}


async def test_only_the_bundle_is_for_others(folder: Path, closed_umask: None) -> None:
    authority = await CertificateAuthority.open(folder, None)
    assert authority.bundle == folder / "bundle"
    assert await anyio.to_thread.run_sync(modes, folder) == {
        ".": 0o700,
        "lock": 0o600,
        "key.pem": 0o600,
        "certificate.pem": 0o600,
        "bundle": 0o755,
        "bundle/ca-certificates.crt": 0o644,
    }


async def test_it_stays_the_same(folder: Path) -> None:
    first = await CertificateAuthority.open(folder, None)
    before = await anyio.Path(folder / "bundle" / "ca-certificates.crt").stat()
    second = await CertificateAuthority.open(folder, None)
    after = await anyio.Path(folder / "bundle" / "ca-certificates.crt").stat()
    assert first.seed == second.seed
    assert before.st_ino == after.st_ino


async def test_two_folders_have_different_seeds(tmp_path: Path) -> None:
    authorities = [await CertificateAuthority.open(tmp_path / name, None) for name in ("a", "b")]
    assert authorities[0].seed != authorities[1].seed


async def test_two_servers_make_one_authority(folder: Path) -> None:
    opened = list[CertificateAuthority]()

    async def open_it() -> None:
        opened.append(await CertificateAuthority.open(folder, None))

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(open_it)
    assert len({each.seed for each in opened}) == 1


async def test_the_bundle_has_the_machines_certificates_a_companys_and_ours(folder: Path) -> None:
    company = trustme.CA()
    await anyio.Path(folder.parent / "company.pem").write_bytes(
        "# Autorität\n".encode() + company.cert_pem.bytes().replace(b"\n", b"\r\n")
    )
    authority = await CertificateAuthority.open(folder, folder.parent / "company.pem")
    data = await anyio.Path(authority.bundle / "ca-certificates.crt").read_bytes()
    machines = await anyio.to_thread.run_sync(load_trusted, None)
    assert data.startswith(machines)
    assert machines.count(b"BEGIN CERTIFICATE") > 50
    theirs, ours = x509.load_pem_x509_certificates(data[len(machines) :])
    assert theirs == x509.load_pem_x509_certificate(company.cert_pem.bytes())
    assert (
        ours.public_bytes(Encoding.PEM) == await anyio.Path(folder / "certificate.pem").read_bytes()
    )
    assert authority.trusted == data[: data.index(ours.public_bytes(Encoding.PEM))]


@pytest.mark.parametrize("words", [b"", b"nothing here", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
async def test_a_bundle_without_certificates_is_an_error(folder: Path, words: bytes) -> None:
    bundle = anyio.Path(folder.parent / "company.pem")
    await bundle.write_bytes(words)
    with pytest.raises(ConfigError, match=r"company\.pem holds no certificates"):
        await CertificateAuthority.open(folder, Path(bundle))
    await bundle.unlink()
    with pytest.raises(ConfigError, match=r"company\.pem cannot be read: No such file"):
        await CertificateAuthority.open(folder, Path(bundle))


async def test_a_damaged_certificate_in_a_bundle_is_an_error(folder: Path) -> None:
    bundle = anyio.Path(folder.parent / "company.pem")
    await bundle.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(ConfigError, match="is damaged"):
        await CertificateAuthority.open(folder, Path(bundle))


async def test_a_damaged_key_is_an_error_and_a_damaged_certificate_is_made_anew(
    folder: Path,
) -> None:
    await CertificateAuthority.open(folder, None)
    certificate, key = (anyio.Path(folder / name) for name in ("certificate.pem", "key.pem"))
    await certificate.write_bytes(b"damaged")
    await CertificateAuthority.open(folder, None)
    assert (await certificate.read_bytes()).startswith(b"-----BEGIN CERTIFICATE-----")
    await key.write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"key\.pem is damaged: move it away"):
        await CertificateAuthority.open(folder, None)


async def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    await anyio.Path(tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageUnavailable):
        await CertificateAuthority.open(tmp_path / "file" / "authority", None)


def ending_in(folder: Path, days: int) -> bytes:
    """Have its certificate end in some days; returns it."""
    key = load_pem_private_key((folder / "key.pem").read_bytes(), None)
    before = x509.load_pem_x509_certificate((folder / "certificate.pem").read_bytes())
    builder = x509.CertificateBuilder(before.issuer, before.subject, before.public_key(), 1)
    now = datetime.now(UTC)
    made = builder.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(days))
    data = made.sign(key, SHA256()).public_bytes(Encoding.PEM)  # type: ignore[arg-type]
    (folder / "certificate.pem").write_bytes(data)
    return data


@pytest.mark.parametrize(("days", "is_kept"), [(29, False), (31, True)])
async def test_it_is_renewed_a_month_before_its_end(folder: Path, days: int, is_kept: bool) -> None:
    first = await CertificateAuthority.open(folder, None)
    old = await anyio.to_thread.run_sync(ending_in, folder, days)
    second = await CertificateAuthority.open(folder, None)
    new = await anyio.Path(folder / "certificate.pem").read_bytes()
    assert (new == old) == is_kept
    assert new in await anyio.Path(folder / "bundle" / "ca-certificates.crt").read_bytes()
    assert first.seed == second.seed


LONG = f"{'a' * 63}.{'b' * 63}.{'c' * 63}.example.com"


@pytest.mark.parametrize("host", ["api.example.com", "with_underscore.example.com", LONG])
async def test_strict_clients_trust_the_leaf_of_a_host_and_no_other(
    folder: Path, host: str
) -> None:
    authority = await CertificateAuthority.open(folder, None)
    server = await context_for(authority, host)
    assert await authority.leaf(host) is await authority.leaf(host)
    bundle = str(authority.bundle / "ca-certificates.crt")
    await anyio.to_thread.run_sync(shake_hands, server, bundle, host)
    with pytest.raises(ssl.SSLCertVerificationError):
        await anyio.to_thread.run_sync(shake_hands, server, bundle, "other.example.com")


async def context_for(authority: CertificateAuthority, host: str) -> ssl.SSLContext:
    """What the process that serves connections makes of a leaf."""

    async def ask(what: str, **said: str) -> dict[str, str]:
        return {what: (await authority.leaf(said["host"])).decode()}

    return await Keeper(ask).context(Target(host, 443))


def shake_hands(server: ssl.SSLContext, bundle: str, host: str) -> None:
    context = ssl.create_default_context(cafile=bundle)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.set_alpn_protocols(["h2", "http/1.1"])
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(back, there, server_hostname=host)
    answering = server.wrap_bio(there, back, server_side=True)
    for each in (client, answering, client, answering):
        try:
            each.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert client.selected_alpn_protocol() == "http/1.1"


async def test_what_one_has_signed_is_good_for_all_that_share_a_secret(tmp_path: Path) -> None:
    first, second, other = [
        await CertificateAuthority.open(tmp_path / name, None, shared)
        for name, shared in (("a", "secret"), ("b", "secret"), ("c", "another"))
    ]
    assert first.seed == second.seed != other.seed
    host, file = "api.example.com", "ca-certificates.crt"
    server = await context_for(first, host)
    await anyio.to_thread.run_sync(shake_hands, server, str(second.bundle / file), host)
    with pytest.raises(ssl.SSLCertVerificationError):
        await anyio.to_thread.run_sync(shake_hands, server, str(other.bundle / file), host)


async def test_openssl_finds_nothing_wrong_with_it(folder: Path) -> None:
    await CertificateAuthority.open(folder, None)
    file = str(folder / "certificate.pem")
    command = ["openssl", "verify", "-x509_strict", "-check_ss_sig", "-CAfile", file, file]
    done = await anyio.run_process(command, stderr=subprocess.STDOUT)
    assert done.stdout.strip() == f"{file}: OK".encode()
    certificate = x509.load_pem_x509_certificate(await anyio.Path(file).read_bytes())
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value == x509.BasicConstraints(True, 0)
    taken = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert taken == timedelta(days=401)


async def test_leaves_are_few_in_memory(folder: Path) -> None:
    authority = await CertificateAuthority.open(folder, None)
    first = await authority.leaf("0.example.com")
    for number in range(1, 257):
        await authority.leaf(f"{number}.example.com")
    assert await authority.leaf("0.example.com") is not first
