"""The media type of a file, by its name; the same on every machine. Pure."""

import mimetypes
from pathlib import PurePosixPath

from mcp_sandbox.skills.models import FileKind

# What the standard library lacks, or takes for something that no skill has.
_MORE = {
    ".bash": "application/x-sh",
    ".cjs": "text/javascript",
    ".go": "text/x-go",
    ".ipynb": "application/x-ipynb+json",
    ".jsonl": "application/jsonl",
    ".jsx": "text/javascript",
    ".md": "text/markdown",
    ".mdx": "text/markdown",
    ".ps1": "text/x-powershell",
    ".rb": "text/x-ruby",
    ".rs": "text/x-rust",
    ".sql": "application/sql",
    ".toml": "application/toml",
    ".ts": "text/typescript",
    ".tsx": "text/typescript",
    ".ttf": "font/ttf",
    ".otf": "font/otf",
    ".woff": "font/woff",
    ".woff2": "font/woff2",
    ".xsd": "application/xml",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
}
# Not the module's own functions: these know what the machine's files say, too.
_TYPES = mimetypes.MimeTypes()
for _ending, _type in _MORE.items():
    _TYPES.add_type(_type, _ending)
_PACKED = {"gzip": "application/gzip", "bzip2": "application/x-bzip2", "xz": "application/x-xz"}
_UNKNOWN: dict[FileKind, str] = {"text": "text/plain", "binary": "application/octet-stream"}


def mime_of(path: str, kind: FileKind) -> str:
    """The media type; where the name says nothing, plain text or just bytes."""
    # The ending alone: a whole name could be taken for a URL.
    ending = PurePosixPath(path).suffix.lower()
    guessed, packed = _TYPES.guess_type(f"file{ending}")
    if packed is not None:
        return _PACKED.get(packed, _UNKNOWN["binary"])
    return guessed or _UNKNOWN[kind]
