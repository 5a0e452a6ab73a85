"""The least that forwards CONNECT, to measure ours against it: `python -m benchmarks.forwarder`."""

import asyncio
import os
from asyncio import StreamReader, StreamWriter

PORT = 3128
_PIECE = 262_144


async def _pass(source: StreamReader, sink: StreamWriter) -> None:
    while data := await source.read(_PIECE):
        sink.write(data)
        await sink.drain()
    sink.close()


async def _forward(reader: StreamReader, writer: StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    host, _, port = head.split()[1].decode().rpartition(":")
    outer_reader, outer_writer = await asyncio.open_connection(host, int(port), limit=_PIECE)
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    await asyncio.gather(_pass(reader, outer_writer), _pass(outer_reader, writer))


async def _main() -> None:
    server = await asyncio.start_server(_forward, "127.0.0.1", PORT, limit=_PIECE)
    # In one piece, also where output is not buffered.
    os.write(1, b"ready\n")
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
