"""`python -m tests.world FOLDER`, in new namespaces: serves until stdin ends."""

import os
import subprocess
import sys
from pathlib import Path

import trustme

from tests.world import (
    CANARIES,
    COMPANY,
    COMPANY_AT,
    DATABASE,
    GITS,
    LOCAL,
    OTHER,
    PUBLIC,
    PUBLIC6,
    PUBLIC_SUFFIXES,
    SHOPS,
    stock,
)
from tests.world.heard import Heard
from tests.world.names import NameServer
from tests.world.sites import Site, TlsSite, canary, database, serving

_NAME_SERVER = "127.0.0.53"
_NAMES = (*(f"*{suffix}" for suffix in PUBLIC_SUFFIXES), *SHOPS, *GITS)


def _addresses() -> None:
    own = {*CANARIES, DATABASE[0]} - {"127.0.0.1", "::1"}
    lines = ["link set lo up", *(f"addr add {each} dev lo" for each in sorted(own))]
    subprocess.run(
        ["ip", "-batch", "-"], input="\n".join(lines).encode(), check=True, stdout=sys.stderr
    )


def _shadow(folder: Path) -> Path:
    """Put our resolver and authority where this machine's are; the file of the server's key."""
    authority = trustme.CA()
    files = {
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
        "resolv.conf": f"nameserver {_NAME_SERVER}\noptions timeout:2 attempts:1\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
        subprocess.run(["mount", "--bind", folder / name, f"/etc/{name}"], check=True)
    certs = folder / "certs"
    certs.mkdir()
    authority.cert_pem.write_to_path(certs / "ca-certificates.crt")
    subprocess.run(["mount", "--bind", certs, "/etc/ssl/certs"], check=True)
    leaf = folder / "leaf.pem"
    authority.issue_cert(*_NAMES).private_key_and_cert_chain_pem.write_to_path(leaf)
    return leaf


def _company(folder: Path) -> Path:
    """Another authority, which nobody here trusts yet; the file of the key of a server of its."""
    authority, leaf = trustme.CA(), folder / "company-leaf.pem"
    authority.cert_pem.write_to_path(folder / COMPANY)
    authority.issue_cert(*_NAMES).private_key_and_cert_chain_pem.write_to_path(leaf)
    return leaf


def main(folder: Path) -> None:
    # What shadows the machine's files must be readable for users without privileges, too.
    os.umask(0o022)
    folder.chmod(0o755)
    leaf = _shadow(folder)
    _addresses()
    shelves = stock.laid_out(folder / "stock")
    with (folder / "heard").open("a") as file:
        heard = Heard(file)
        serving(NameServer((_NAME_SERVER, 53), heard))
        for address in (PUBLIC, PUBLIC6, OTHER):
            serving(Site((address, 80), heard, shelves))
            serving(Site((address, 8080), heard, shelves))
            serving(TlsSite((address, 443), heard, shelves, leaf))
            serving(TlsSite((address, 8443), heard, shelves, leaf))
        serving(TlsSite(COMPANY_AT, heard, shelves, _company(folder)))
        serving(Site(LOCAL, heard, shelves))
        serving(database(DATABASE, heard))
        for address, ports in CANARIES.items():
            for port in ports:
                serving(canary((address, port), heard))
        os.write(1, b"ready\n")
        while sys.stdin.buffer.read(1):
            pass
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
