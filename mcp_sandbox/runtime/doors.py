"""Doors: connections that programs inside make to a port there, each answered by a handler here.

They come over a channel of their own, which is no use of the sandbox; see `runner/doors.py`.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from anyio.abc import ByteStream

PORT = 17329
Handler = Callable[[ByteStream], Awaitable[None]]


def doors(
    open_channel: Callable[[], Awaitable[ByteStream]],
    token: bytes,
    handler: Handler,
    *,
    at: int | str = PORT,
) -> AbstractAsyncContextManager[Callable[[], Awaitable[object]]]:
    """Listen inside, on a port of 127.0.0.1 or the path of a unix socket, while the block lasts.

    `open_channel` and `token` are those of the sandbox. `handler` gets every connection as a stream
    and is cancelled with the block, or when the channel ends. What is yielded waits for that end.

    Raises:
        Busy: a program inside listens there already.
        SandboxGone: the sandbox does not answer.
    """
    raise NotImplementedError
