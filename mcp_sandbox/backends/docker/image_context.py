"""What an image is built from: its folder, the runner and the relay, as one tar file.

They are found beside the package in a checkout and inside it in an installed wheel.
"""

import hashlib
import io
import tarfile
from functools import cache
from pathlib import Path

from mcp_sandbox.errors import ConfigError

_PACKAGE = Path(__file__).parents[2]
_FOLDERS = (_PACKAGE / "_images", _PACKAGE.parent / "images")
CA_BUNDLE = "ca-bundle.crt"


@cache
def runner_digest() -> str:
    """The digest of the runner's sources: an image carries it as a label."""
    digest = hashlib.sha256()
    for source in runner_sources():
        data = source.read_bytes()
        digest.update(f"{source.relative_to(_PACKAGE)} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def runner_sources() -> list[Path]:
    """The files that every image holds."""
    return [*sorted((_PACKAGE / "runner").rglob("*.py")), _PACKAGE / "relay.py"]


def image_names() -> list[str]:
    """The images that can be built."""
    found = {folder.parent.name for root in _FOLDERS for folder in root.glob("*/Dockerfile")}
    return sorted(found)


def image_folder(name: str) -> Path:
    """The folder of an image.

    Raises:
        ConfigError: there is no such image.
    """
    if name in image_names():
        return next(root / name for root in _FOLDERS if (root / name / "Dockerfile").is_file())
    raise ConfigError(f"there is no image {name!r}: choose one of {', '.join(image_names())}")


def context_tar(folder: Path, ca_bundle: Path | None) -> io.BytesIO:
    """The build context.

    Raises:
        ConfigError: the CA bundle cannot be read.
    """
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            _add(tar, path.name, path.read_bytes())
        for source in runner_sources():
            _add(tar, f"mcp_sandbox/{source.relative_to(_PACKAGE)}", source.read_bytes())
        if ca_bundle:
            _add(tar, CA_BUNDLE, _read_bundle(ca_bundle))
    target.seek(0)
    return target


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    # Root-owned and dated zero: the same sources give the same layer.
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    entry.mode = 0o644
    tar.addfile(entry, io.BytesIO(data))


def _read_bundle(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(
            f"the CA bundle {path} cannot be read ({exc.strerror}): give a file of certificates"
        ) from exc
