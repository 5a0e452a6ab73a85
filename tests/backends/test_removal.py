import os
from pathlib import Path

from mcp_sandbox.backends.docker.record import Record
from mcp_sandbox.backends.removal import remove_tree


def plant(top: Path) -> None:
    """What code in a sandbox could leave: too deep for a path, links out, closed directories."""
    here = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.symlink("/etc", "link", dir_fd=here)
    os.close(here)
    (top / "closed" / "in" / "here").mkdir(parents=True)
    for name in ("closed/in/here", "closed/in", "closed"):
        (top / name).chmod(0)
    top.chmod(0)


def test_deep_and_closed_trees_are_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    plant(top)
    remove_tree(top)
    assert not top.exists()
    assert Path("/etc/passwd").exists()


def test_record_of_a_container_goes_whatever_code_put_beside_the_socket(tmp_path: Path) -> None:
    record = Record(tmp_path / "mcs-0123456789abcdef")
    record.write(b"secret", "none")
    plant(record.sockets)
    record.remove()
    assert list(tmp_path.iterdir()) == []
    record.remove()
