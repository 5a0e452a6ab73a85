"""What an image is built from: its folder, the runner and the relay, as one tar file.

The folders are found beside the package in a checkout and inside it in an installed wheel.
"""

import io
import tarfile
from pathlib import Path

from mcp_sandbox.backends.runner_sources import PACKAGE, runner_sources
from mcp_sandbox.errors import ConfigError

_FOLDERS = (PACKAGE / "_images", PACKAGE.parent / "images")
CA_BUNDLE = "ca-bundle.crt"


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
            _add(tar, f"mcp_sandbox/{source.relative_to(PACKAGE)}", source.read_bytes())
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
