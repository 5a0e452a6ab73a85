"""Runs the code of a call again, as `__main__` of processes that multiprocessing starts anew."""

import os
import sys
from _frozen_importlib_external import SourceFileLoader


def code_path(name: str) -> str:
    """Return the path of a call's code while it runs."""
    return f"/tmp/run-{name}.py"


def adapt_spawn(spawn: object) -> None:
    """Have the processes that `multiprocessing.spawn` starts run this file."""
    prepare, own = vars(spawn)["get_preparation_data"], os.path.abspath(__file__)

    def get_preparation_data(name: str) -> dict[str, object]:
        data: dict[str, object] = prepare(name)
        shown = data.get("init_main_from_path", "")  # A notebook has none.
        return {**data, "init_main_from_path": own, "sys_argv": [*sys.argv, shown]}

    vars(spawn)["get_preparation_data"] = get_preparation_data


if __name__ == "__mp_main__":
    adapt_spawn(sys.modules["multiprocessing.spawn"])
    # Nothing of ours can be imported here: the code's place comes as the last argument.
    __file__ = sys.argv[-1]
    path = code_path(os.path.basename(__file__)[4:-3])
    __loader__ = SourceFileLoader(__name__, path)
    # A server of forks may load this file before there are arguments, and its forks once more.
    if os.path.isfile(path):
        sys.argv[0] = sys.argv.pop()
        exec(__loader__.source_to_code(__loader__.get_data(path), path))
    elif not __file__:

        def _fail(*_: object, **__: object) -> None:
            raise RuntimeError(
                "processes started by spawn or forkserver do not have what cells define: use "
                "multiprocessing.get_context('fork'), or import it from a file"
            )

        # For what a cell defines; an error before its call would end the process unheard.
        def __getattr__(name: str) -> type:
            return type(name, (), {"__init__": _fail})
