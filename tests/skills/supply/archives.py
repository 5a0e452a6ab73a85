"""Archives as no honest program writes them."""

import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping

DOCUMENT = b"---\nname: pdf\ndescription: Read PDF files.\n---\n# PDF\n"


def packed(files: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Return an ordinary archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def with_mode(name: str, mode: int, data: bytes = b"x") -> bytes:
    """Return an archive with an entry of that file type and rights."""
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("pdf/SKILL.md", DOCUMENT)
        archive.writestr(info, data)
    return buffer.getvalue()


def link(target: str) -> bytes:
    return with_mode("pdf/link", stat.S_IFLNK | 0o777, target.encode())


def quoted_bomb(entries: int = 200, size: int = 1 << 20) -> bytes:
    """Return an archive whose entries all share one compressed body."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    body = packer.compress(bytes(size)) + packer.flush()
    crc = zlib.crc32(bytes(size))
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 8, 0, 0, crc, len(body), size, 6, 0)
    data = local + b"pdf/xx" + body
    directory = b""
    for number in range(entries):
        name = f"pdf/{number:02x}".encode()[:6].ljust(6, b"x")
        directory += struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 8, 0, 0, crc, len(body), size, 6, 0, 0, 0, 0, 0, 0
        ) + name  # fmt: skip
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, entries, entries, len(directory), len(data), 0)
    return data + directory + end


def lying_about_size(claimed: int, real: int) -> bytes:
    """Return an archive with an entry that is larger than it says."""
    data = bytearray(packed({"pdf/SKILL.md": DOCUMENT, "pdf/large": bytes(real)}))
    for mark, offset in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
        at = data.rindex(mark)
        data[at + offset : at + offset + 4] = struct.pack("<I", claimed)
    return bytes(data)


def zip64() -> bytes:
    """Return an archive with the end record of a very large one."""
    data = packed({"pdf/SKILL.md": DOCUMENT})
    end = data.rindex(b"PK\5\6")
    size, offset = struct.unpack("<2I", data[end + 12 : end + 20])
    record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, size, offset)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
    return data[:end] + record + locator + data[end:]
