"""Whether a sandbox has the mounts that it was made with, by what the kernel shows of it. Pure."""

from collections.abc import Mapping


def wrong_mounts(mountinfo: str, wanted: Mapping[str, bool]) -> list[str]:
    """What /proc/PID/mountinfo lacks; `wanted` maps where a mount should be to whether read-only.

    A mount that went through a link lies elsewhere than it should.
    """
    lines = (line.split(" ") for line in mountinfo.splitlines())
    # Of several at one place the last one is seen.
    found = {fields[4]: fields[5].split(",") for fields in lines if len(fields) > 5}
    return [
        f"nothing is mounted at {target}"
        if target not in found
        else f"{target} can be written to and should be read-only"
        for target, read_only in wanted.items()
        if target not in found or (read_only and "ro" not in found[target])
    ]
