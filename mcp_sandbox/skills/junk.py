"""What tools leave in folders and nobody means to teach: no part of any skill, never searched."""

JUNK_FOLDERS = frozenset(
    {
        ".git",
        ".hg",
        ".svn",
        "node_modules",
        "__pycache__",
        ".venv",
        ".tox",
        ".nox",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
    }
)
_FILES = frozenset({".DS_Store", "Thumbs.db", "desktop.ini", ".git"})
_ENDINGS = (".pyc", ".pyo")


def is_junk_file(name: str) -> bool:
    """Whether a file of that name is no part of a skill."""
    return name in _FILES or name.endswith(_ENDINGS)


def is_junk(path: str) -> bool:
    """Whether a path relative to a skill's folder leads to or into what is no part of it."""
    *folders, name = path.split("/")
    return not JUNK_FOLDERS.isdisjoint((*folders, name)) or is_junk_file(name)
