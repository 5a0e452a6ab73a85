"""What an operator is told to add to the image."""

import pytest
from typer.testing import CliRunner

from mcp_sandbox.cli import cli
from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.skills.needs.findings import (
    Inventory,
    find_missing,
    read_layers,
    scan,
    write_recipe,
)


def test_a_recipe_adds_to_the_image_and_ends_as_its_user() -> None:
    lines = write_recipe(["build", "web"]).splitlines()
    assert lines[0] == "FROM mcp-sandbox/base:latest"
    assert lines[-1] == "USER 10001:10001"
    assert "build-essential" in lines[2]
    assert lines[3].startswith("RUN pip install --no-cache-dir aiohttp beautifulsoup4")
    assert lines[4] == (
        "RUN npm install --prefix /opt/node --no-audit --no-fund axios cheerio "
        "&& ln -s /opt/node/node_modules /node_modules"
    )


def test_what_a_layer_is_said_to_have_is_in_its_recipe() -> None:
    files = {
        "a.sh": b"pdftotext x | gcc y; libreoffice z\n",
        "b.py": b"import PIL, numpy, fitz, sklearn, requests, docx\n",
        "c.mjs": b"import 'docx'; import 'cheerio'\n",
    }
    _, needs = scan(files)
    lacking = [each for each in find_missing(needs, Inventory()) if each.need != "interpreter"]
    known = [each for each in lacking if each.name != "bash"]
    assert len(known) == 11
    for each in known:
        assert each.layer, each
        installed = write_recipe([each.layer]).split()
        assert each.fix.split()[-1] in installed, each


def test_an_unknown_layer_is_answered_with_those_there_are() -> None:
    with pytest.raises(InvalidArgument, match="documents, data, browser, build, web"):
        write_recipe(["music"])


def test_the_command_line_prints_the_recipe() -> None:
    printed = CliRunner().invoke(cli, ["images", "recipe", *read_layers()])
    assert printed.exit_code == 0, printed.output
    assert printed.output == write_recipe([*read_layers()])
