"""`python -m mcp_sandbox` is `mcp-sandbox`."""

import os
import sys

from mcp_sandbox import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    # The C half of `signal`: the other takes long enough to load to be interrupted in.
    import _signal as signal


def main() -> None:
    """Run the command line; the relay, which clients wait for, without loading the rest of it."""
    # What it makes, nobody else may change, whoever has started it.
    os.umask(os.umask(0o022) | 0o022)
    if sys.argv[1:2] == ["connect"]:
        from mcp_sandbox.relay.connect import run
        from mcp_sandbox.relay.place import DaemonAddress, parse_options

        if options := parse_options(sys.argv[2:]):
            sys.exit(run(DaemonAddress(options[0], __version__, may_start=options[1])))
    # A client may interrupt us at any moment; until all is loaded there is nothing to undo, and a
    # traceback out of an import is of no help.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mcp_sandbox.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
