"""What is lacking, and what a person is told to do about it."""

from mcp_sandbox.skills.needs.findings import Inventory, find_missing, scan
from mcp_sandbox.skills.skill import MissingRequirement

BASE = Inventory(
    commands=frozenset({"python3", "bash", "curl", "node"}),
    modules=frozenset({"json", "os", "sys", "tomllib", "google.auth"}),
    distributions=frozenset({"pip"}),
)


def lacking(files: dict[str, bytes], inventory: Inventory = BASE) -> dict[str, MissingRequirement]:
    _, needs = scan(files)
    return {each.name: each for each in find_missing(needs, inventory)}


def test_what_is_lacking_names_its_files_its_layer_and_its_package() -> None:
    files = {
        "scripts/a.py": b"import json\nfrom PIL import Image\n",
        "scripts/b.py": b"import PIL\n",
        "scripts/c.sh": b"pdftotext x; curl x; brew install y\n",
    }
    found = lacking(files)
    assert found["PIL"] == MissingRequirement(
        "python", "PIL", ("scripts/a.py", "scripts/b.py"), "documents", "pip install pillow"
    )
    assert found["pdftotext"] == MissingRequirement(
        "command", "pdftotext", ("scripts/c.sh",), "documents", "apt-get install poppler-utils"
    )
    assert found["brew"].layer is None
    assert found["brew"].fix == "only on macOS"
    assert found.keys() == {"PIL", "pdftotext", "brew"}


def test_a_name_that_no_table_has_is_not_given_a_layer() -> None:
    found = lacking({"a.sh": b"acme-cli x\n"})["acme-cli"]
    assert (found.layer, found.fix) == (None, "no layer is known to have it")


def test_what_a_script_does_without_is_not_lacking() -> None:
    text = b"try:\n    import rich\nexcept ImportError:\n    rich = None\n"
    tomli = b"try:\n    import tomllib\nexcept ImportError:\n    import tomli\n"
    assert lacking({"a.py": text, "b.py": tomli}) == {}
    assert set(lacking({"b.py": tomli}, Inventory(commands=BASE.commands))) == {"tomli"}


def test_parts_of_a_namespace_are_told_apart() -> None:
    text = b"import google.auth\nfrom google.cloud import storage\n"
    assert set(lacking({"a.py": text})) == {"google.cloud"}


def test_what_every_use_needs_comes_first() -> None:
    text = b"import zzz\ndef f():\n    import aaa\n"
    found = lacking({"a.py": text})
    assert [(each.name, each.always) for each in found.values()] == [("zzz", True), ("aaa", False)]


def test_a_requirement_that_is_imported_is_told_once() -> None:
    files = {"a.py": b"import yaml\n", "requirements.txt": b"PyYAML\nopenpyxl\n"}
    assert set(lacking(files)) == {"yaml", "openpyxl"}


def test_hosts_are_out_of_reach_without_a_network_only() -> None:
    files = {"a.sh": b"curl https://api.acme.io/\nuv pip install x\n"}
    found = lacking(files)
    assert found["api.acme.io"].need == "network"
    assert found["api.acme.io"].needed_by == ("a.sh",)
    assert found["pip install"].fix == "this sandbox has no network"
    open_ = Inventory(commands=frozenset({"bash", "curl", "uv"}), network=True)
    assert lacking(files, open_) == {}
