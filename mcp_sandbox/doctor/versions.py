"""What is known of old versions of the programs that isolate. Pure: text in, warnings out."""

import re
from dataclasses import dataclass

Version = tuple[int, int, int]
_NUMBERS = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")
# How distributions mark their builds, into which they often take fixes without a new number.
_DISTRIBUTION = re.compile(r"[+~](ds|dfsg|deb)|ubuntu|\.(el|fc)\d")


@dataclass(frozen=True)
class Hole:
    """A known hole and the first version without it in each line of releases."""

    program: str
    names: str
    what: str
    fixed: tuple[Version, ...]


HOLES = (
    Hole(
        "runc",
        "CVE-2024-21626",
        "a leaked file descriptor leads out of a container",
        ((1, 1, 12),),
    ),
    Hole(
        "runc",
        "CVE-2025-31133, CVE-2025-52565, CVE-2025-52881",
        "races at start-up can make host files writable",
        ((1, 2, 8), (1, 3, 3), (1, 4, 0)),
    ),
    Hole(
        "containerd",
        "CVE-2024-40635",
        "an overlong user id runs as root",
        ((1, 6, 38), (1, 7, 27), (2, 0, 4)),
    ),
    Hole(
        "docker",
        "CVE-2024-24557, CVE-2024-23651",
        "building a hostile image can reach the host",
        ((24, 0, 9), (25, 0, 2)),
    ),
    Hole(
        "docker",
        "CVE-2025-54410",
        "a reload of firewalld opens container networks to each other",
        ((25, 0, 13), (28, 0, 0)),
    ),
)


def parse(text: str) -> Version | None:
    """Return the numbers of a version text, or None when it has none."""
    match = _NUMBERS.match(text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def holes_of(program: str, text: str) -> tuple[Hole, ...]:
    """Return the holes that a version of that number has as far as upstream is concerned."""
    version = parse(text)
    if version is None:
        return ()
    return tuple(hole for hole in HOLES if hole.program == program and not _has_fix(version, hole))


def remedy(program: str, text: str, holes: tuple[Hole, ...]) -> str:
    """Say what to install, and that a distribution's build may have the fixes already."""
    versions = sorted({version for hole in holes for version in hole.fixed})
    wanted = " or ".join(".".join(map(str, version)) for version in versions[-2:])
    update = f"update {program} to {wanted} or newer"
    if _DISTRIBUTION.search(text):
        return (
            f"{update}, unless your distribution's security tracker says that this build has the "
            "fixes; the number cannot tell"
        )
    return update


def _has_fix(version: Version, hole: Hole) -> bool:
    for fixed in hole.fixed:
        if version[:2] == fixed[:2]:
            return version >= fixed
    return version > max(hole.fixed)
