"""Copies files into a chat's sandbox and out of it: a tar through a shell without a terminal."""

import secrets
from contextlib import suppress

import anyio

from mcp_sandbox.daemon.acceptor import Connection
from mcp_sandbox.daemon.chats import Chats
from mcp_sandbox.daemon.client import JsonObject
from mcp_sandbox.errors import SandboxError

_CLEAN_S = 30.0
_PATH = r"""
fail() { echo "$p in the sandbox $1" >&2; exit 2; }
p=${1:-.}; [[ $p == '~' || $p == '~/'* ]] && p=$HOME${p:1}; [[ $p == /* ]] || p=./$p
"""
_OUT = rf"""{_PATH}
tar --help 2>&1 | grep -q -e --hard-dereference && gnu='--format=gnu --hard-dereference'
if [[ -d $p ]]; then cd "$p" && tar $gnu -cf - .
elif [[ -f $p ]]; then cd "${{p%/*}}/" && tar $gnu -chf - "./${{p##*/}}"
else fail 'is no file or folder'
fi
code=$?; [[ $gnu && $code == 1 ]] || exit $code  # With 1 it says that something changed meanwhile.
"""
# The stage is named like the runner's own drafts, which file lists leave out.
_IN = rf"""{_PATH}
[[ -d $p ]] && p=${{p%/}}/$2
stage=${{p%/*}}/.~mcp-$3
[[ $0 == clean ]] && chmod -R u+rwx "$stage" 2>/dev/null
[[ $0 == clean ]] && exec rm -rf "$stage"
[[ $p != */ && -d ${{p%/*}}/ ]] || fail 'is in no folder that is there'
[[ -d $p || ( -e $p || -L $p ) && ! $4 ]] && fail 'is there: --force replaces files, no folders'
mkdir -m 700 "$stage" && tar -xpof - -C "$stage" && chmod u+w "$stage/x" &&
  mv -fT "$stage/x" "$p" && rmdir "$stage"
"""


async def copy(chats: Chats, arguments: JsonObject, connection: Connection) -> None:
    """Stream a tar out of a chat; or, given a `name`, into it, with one entry called `x`.

    The copy gets its name when it is complete; after a failure nothing is left.
    """
    path, name = (str(arguments.get(key) or "") for key in ("path", "name"))
    plain = {**arguments, "tty": False, "rows": 1, "columns": 1}
    if not name:
        await chats.shell({**plain, "command": ["bash", "-c", _OUT, "cp", path]}, connection)
        return
    given = [path, name, secrets.token_hex(8), "force" if arguments.get("force") else ""]
    session = await chats.session(arguments)
    try:
        await chats.shell({**plain, "command": ["bash", "-c", _IN, "cp", *given]}, connection)
    finally:
        with anyio.move_on_after(_CLEAN_S, shield=True), suppress(SandboxError):
            await session.exec(["bash", "-c", _IN, "clean", *given])
