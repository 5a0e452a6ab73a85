"""Where the shipped skills are, and the code in their texts."""

import json
import re
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parents[2] / "skills"
NAMES = sorted(folder.name for folder in SHIPPED.iterdir())


def commands(name: str, document: str = "SKILL.md", language: str = "sh") -> list[str]:
    """The code blocks of a language in a text of a skill, also those in lists."""
    text = (SHIPPED / name / document).read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    assert found, (name, document)
    return [re.sub(f"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def calls(name: str) -> list[dict[str, Any]]:
    """The calls of tools in the text of a skill, one a line."""
    return [
        json.loads(line) for block in commands(name, language="json") for line in block.splitlines()
    ]
