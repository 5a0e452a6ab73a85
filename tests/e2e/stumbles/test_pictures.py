import base64

from mcp.types import ImageContent

from mcp_sandbox.runner.files.reading import MAX_IMAGE
from tests.e2e.stumbles.conftest import META, Agent
from tests.server.real_pictures import REAL, png
from tests.server.scripted import text_of


async def write(agent: Agent, path: str, data: bytes) -> None:
    content = base64.b64encode(data).decode()
    await agent.told("write_file", path=path, content=content, encoding="base64")


async def test_pictures_are_shown_with_their_pixels(agent: Agent) -> None:
    for name, data in (*REAL.items(), ("made.png", png(640, 480))):
        await write(agent, name, data)
        result = await agent.call("read_file", path=name)
        mime, pixels = result.content[1].mime_type, "640 × 480" if name == "made.png" else "16 × 12"  # noqa: RUF001
        assert text_of(result) == f"{name}: {mime}, {pixels} pixels, {len(data):,} bytes"
        assert base64.b64decode(result.content[1].data) == data


async def test_pictures_that_a_models_service_refuses_are_told_as_text(agent: Agent) -> None:
    whole = {name.rpartition(".")[2]: data for name, data in REAL.items()}
    for name, data in {
        "ten bytes.png": b"\x89PNG\r\n\x1a\n\0\0",
        "cut.png": whole["png"][:-12],
        "zeros.jpg": b"\xff\xd8\xff\xe0" + bytes(5000),
        "cut.jpg": whole["jpg"][:-30],
        "cut.webp": whole["webp"][:-10],
        "cut.gif": whole["gif"][:-1],
        "no pixels.png": png(0, 0),
    }.items():
        await write(agent, name, data)
        result = await agent.call("read_file", path=name)
        assert not result.is_error
        assert not any(isinstance(block, ImageContent) for block in result.content)
        assert result.meta[META]["kind"] == "binary"
        said = text_of(result)
        assert said.startswith(f"{name}: image/")
        assert "not an image to show: it " in said
        assert f"{len(data):,} bytes" in said


async def test_a_picture_with_too_many_pixels_comes_with_the_line_for_a_smaller_copy(
    agent: Agent,
) -> None:
    await write(agent, "wide one.png", png(20_000, 10))
    said = await agent.told("read_file", path="wide one.png")
    assert "20,000 × 10 pixels" in said  # noqa: RUF001
    assert "over 8,000 pixels a side; for a smaller copy, where Pillow or ImageMagick" in said
    # A stand-in for Pillow: the line is right if its two arguments arrive.
    await agent.told(
        "write_file",
        path="PIL/Image.py",
        content="class open:\n"
        "    def __init__(self, name): self.name = name\n"
        "    def thumbnail(self, size): print(self.name, size)\n"
        "    def convert(self, mode): return self\n"
        "    def save(self, name): print(name)\n",
    )
    line = said.splitlines()[-1]
    done = await agent.told("exec", command=line)
    assert "wide one.png (1500, 1500)\nwide one.png.small.jpg\n" in done


async def test_a_picture_with_too_many_bytes_is_told_with_its_size(agent: Agent) -> None:
    data = png(100, 100, bytes(MAX_IMAGE))
    await write(agent, "big.png", data[: MAX_IMAGE // 2])
    rest = base64.b64encode(data[MAX_IMAGE // 2 :]).decode()
    await agent.told("write_file", path="big.png", content=rest, encoding="base64", append=True)
    said = await agent.told("read_file", path="big.png")
    assert said.startswith(f"big.png: image/png, {len(data):,} bytes; ")
    assert "over 3,500,000 bytes; for a smaller copy, " in said
    assert "00000000" not in said
