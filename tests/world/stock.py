"""What the servers of a world have: a wheel, a package for npm, a repository, packages of apt."""

import base64
import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

WHEEL = "tiny-1.0-py3-none-any.whl"
TARBALL = "tiny-1.0.0.tgz"
WORD = "tiny is here"


@dataclass(frozen=True)
class Shelves:
    """Pages by host and path, and the folder of repositories."""

    pages: dict[tuple[str, str], tuple[str, bytes]]
    repositories: Path


def laid_out(folder: Path) -> Shelves:
    folder.mkdir()
    return Shelves({**_index(), **_registry(), **_packages()}, _repositories(folder))


def _index() -> dict[tuple[str, str], tuple[str, bytes]]:
    wheel = io.BytesIO()
    info = "tiny-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("tiny.py", f"print({WORD!r})\n")
        packed.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        packed.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        packed.writestr(f"{info}/RECORD", "")
    page = f'<a href="https://files.pythonhosted.org/{WHEEL}">{WHEEL}</a>'.encode()
    return {
        ("pypi.org", "/simple/tiny/"): ("text/html", page),
        ("files.pythonhosted.org", f"/{WHEEL}"): ("application/zip", wheel.getvalue()),
    }


def _registry() -> dict[tuple[str, str], tuple[str, bytes]]:
    about = {"name": "tiny", "version": "1.0.0", "main": "index.js"}
    contents = {
        "package.json": json.dumps(about).encode(),
        "index.js": f"console.log({WORD!r})".encode(),
    }
    tarball = io.BytesIO()
    with tarfile.open(fileobj=tarball, mode="w:gz") as packed:
        for name, data in contents.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size, member.mode = len(data), 0o644
            packed.addfile(member, io.BytesIO(data))
    host = "registry.npmjs.org"
    digest = base64.b64encode(hashlib.sha512(tarball.getvalue()).digest()).decode()
    dist = {"tarball": f"https://{host}/tiny/-/{TARBALL}", "integrity": f"sha512-{digest}"}
    page = {
        "name": "tiny",
        "dist-tags": {"latest": "1.0.0"},
        "versions": {"1.0.0": {**about, "dist": dist}},
    }
    return {
        (host, "/tiny"): ("application/json", json.dumps(page).encode()),
        (host, f"/tiny/-/{TARBALL}"): ("application/octet-stream", tarball.getvalue()),
    }


def _packages() -> dict[tuple[str, str], tuple[str, bytes]]:
    packages = b"Package: tiny\nVersion: 1.0\nArchitecture: all\nFilename: tiny.deb\nSize: 1\n\n"
    files = {
        "main/binary-amd64/Packages": packages,
        "main/binary-amd64/Packages.gz": gzip.compress(packages),
    }
    sums = "".join(
        f" {hashlib.sha256(data).hexdigest()} {len(data)} {name}\n" for name, data in files.items()
    )
    release = (
        "Origin: Tests\nSuite: tiny\nCodename: tiny\nComponents: main\nArchitectures: amd64\n"
        f"Date: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n{sums}"
    )
    files["Release"] = release.encode()
    return {
        ("deb.debian.org", f"/debian/dists/tiny/{name}"): ("application/octet-stream", data)
        for name, data in files.items()
    }


def _repositories(folder: Path) -> Path:
    work, bare = folder / "work", folder / "git" / "demo.git"
    variables = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}

    def git(*words: str) -> None:
        named = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "gc.auto=0")
        subprocess.run(["git", *named, *words], check=True, env=variables, stdin=subprocess.DEVNULL)

    git("init", "-q", "-b", "main", str(work))
    (work / "README").write_text(f"{WORD}\n")
    git("-C", str(work), "add", "README")
    git("-C", str(work), "commit", "-q", "-m", "One")
    git("clone", "-q", "--bare", str(work), str(bare))
    git("-C", str(bare), "config", "http.receivepack", "true")
    return bare.parent
