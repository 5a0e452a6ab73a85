"""The bash text that gives shells a memory: load the saved state, run a command, save the new one.

A command may redefine builtins: in POSIX mode, which an assignment starts, special builtins
come before functions, and a backslash bypasses aliases. It begins on line 1, for error messages.
"""

from __future__ import annotations

import os

from mcp_sandbox.runner.files.paths import home

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

WHOLE = b"# whole\n"
"""The end of a complete memory, and all of it when nothing was run."""
# Variables equal to those in bash's environment come from the next bash's environment.
_ENVIRONMENT = "mapfile -d '' -t _mcp_environment < /proc/$$/environ"
SAVE = rf"""_mcp_new=$1
\set +euxvf; \trap - DEBUG ERR RETURN; \trap '' XFSZ
\unset -f builtin eval set unset; \unset -v POSIXLY_CORRECT BASH_XTRACEFD
if [[ -v _mcp_code ]]; then \builtin printf '# whole\n' >| "$_mcp_new"
\builtin exit "$_mcp_status"; fi
_mcp_aliases=${{BASH_ALIASES[*]@A}} _mcp_same=' ' _mcp_typed=
\builtin unalias -a; \unset -v BASH_ALIASES
\builtin shopt -s extglob; \builtin shopt -u nocasematch nullglob
_mcp_set=${{_mcp_set//:/ : }}; _mcp_set=${{_mcp_set// @(errexit|noexec|onecmd|privileged) :/}}
_mcp_set="+o braceexpand +o hashall +o interactive-comments${{_mcp_set// : / -o }}"
_mcp_set=${{_mcp_set% -o *( )}}
_mcp_list() {{ \builtin declare -p$1 >| "$_mcp_new"; \builtin mapfile -t _mcp_names < "$_mcp_new"
_mcp_names=("${{_mcp_names[@]/#declare -*([! ])t*/}}")
_mcp_names=("${{_mcp_names[@]#declare -* }}"); _mcp_names=("${{_mcp_names[@]%%=*}}"); }}
if [[ $_mcp_inside ]]; then
_mcp_forget() {{ \unset -v "$@"; }}
_mcp_list; _mcp_all=("${{_mcp_names[@]}}"); \builtin declare -gt "${{_mcp_all[@]}}"
for _mcp_name in "${{FUNCNAME[@]}}"; do _mcp_list; _mcp_forget "${{_mcp_names[@]/#_mcp_*/}}"; done
\builtin declare -g +t "${{_mcp_all[@]}}"; \unset -f _mcp_forget
fi
_mcp_ifs=${{IFS@A}}; _mcp_ifs=${{_mcp_ifs:-:}}; \unset -v IFS
for _mcp_one in i l u c; do _mcp_list $_mcp_one; \builtin declare -g +$_mcp_one "${{_mcp_names[@]}}"
_mcp_typed+="declare -$_mcp_one ${{_mcp_names[*]}}; "; done; \unset -f _mcp_list
\builtin {_ENVIRONMENT}
{{ \builtin printf 'unset -v IFS PS4; shopt -u ${{BASHOPTS//:/ }}; '
\builtin printf 'shopt -s %s\n' "${{_mcp_shopt//:/ }}"
for _mcp_one in "${{_mcp_environment[@]}}"; do _mcp_name=${{_mcp_one%%=*}}
if [[ ! -v $_mcp_name ]]; then \builtin printf 'unset -v %s\n' "$_mcp_name"
elif [[ ${{!_mcp_name@a}} != *x* ]]; then \builtin printf 'export -n %s\n' "$_mcp_name"
elif [[ $_mcp_name=${{!_mcp_name}} == "$_mcp_one" && " $2 " != *" $_mcp_name "* ]]
then _mcp_same+="$_mcp_name "; fi
done
\unset -v _mcp_environment _mcp_names _mcp_all _mcp_one
\builtin declare -p; \builtin umask -p
\builtin printf '%sPWD=%q; eval "$_mcp_hook"\n' "$_mcp_typed" "${{DIRSTACK[0]}}"
for ((_mcp_name = ${{#DIRSTACK[@]}} - 1; _mcp_name > 0; _mcp_name--))
do \builtin printf 'pushd -n %q\n' "${{DIRSTACK[_mcp_name]}}"; done
\builtin declare -f
[[ $_mcp_aliases != *=* ]] || \builtin printf '%s\n' "${{_mcp_aliases#declare -A }}"
\builtin printf '_mcp_name=\n# whole\n'; }} >| "$_mcp_new"
_mcp_saved=y; \builtin eval "$_mcp_ifs"; \builtin exit "$_mcp_status"
""".encode()
"""The text of the file `saver`."""
_TRAP = (
    r"{ _mcp_status=$? _mcp_set=:$SHELLOPTS: _mcp_shopt=$BASHOPTS _mcp_inside=${FUNCNAME+y} "
    r"POSIXLY_CORRECT=y; [[ -v _mcp_saved ]] || \. @SAVER@ @NEW@ '@GIVEN@'; "
    r"} >/dev/null 2>&1 {BASH_XTRACEFD}>/dev/null"
)
# Runs between the variables and the functions, which may be named cd or trap.
_HOOK = r"""hash -r; HOSTNAME=$_mcp_host
for _mcp_one in "${_mcp_environment[@]}"; do _mcp_name=${_mcp_one%%=*}
[[ "$_mcp_same @GIVEN@ " != *" $_mcp_name "* ]] || export "$_mcp_one"; done
if [[ @CWD@ ]]; then cd -- "$_mcp_here"; elif [[ $PWD != "$_mcp_here" ]]; then
_mcp_name=${OLDPWD-}
if cd -- "$PWD"; then OLDPWD=$_mcp_name; else cd -- "$_mcp_here"; : >| @MOVED@; fi
fi
trap "$_mcp_trap" EXIT"""
# Separators come last: with some of them bash cannot even split an array.
_RUN = r'\eval "unset -v \"\${!_mcp_@}\"; $_mcp_ifs; set $_mcp_set; $_mcp_code"'
# `set -v` prints a trap as it begins: no redirection of the command applies then.
_WHOLE = (
    rf"{{ shopt -s expand_aliases; {_ENVIRONMENT}; _mcp_here=$PWD _mcp_host=$HOSTNAME _mcp_set=- "
    r"_mcp_ifs=: _mcp_trap=@QUOTED@ _mcp_code=@CODE@ _mcp_hook=@HOOK@; . @MEMORY@ || eval "
    r'"$_mcp_hook"; } >/dev/null 2>&1; if [[ $_mcp_set == *verbose* || @VERBOSE@ ]]; then '
    rf"exec {{_mcp_err}}>&2 2>/dev/null; {{ {_RUN}; }} 2>&$_mcp_err {{_mcp_err}}>&-; "
    rf"else {_RUN}; fi; @TRAP@"
)


def memory_of(name: str) -> str:
    """Return the path of a shell's saved state."""
    return os.path.join(home(), ".mcp-sandbox", "shells", f"{name}.sh")


def saver(memory: str) -> str:
    """Return the path of the saving script, beside the state: a longer trap would be slower."""
    return os.path.join(os.path.dirname(memory), "save.bash")


def remembering(code: bytes, memory: str, given: Iterable[str], *, cwd: bool) -> bytes:
    """Return `code`, to run with the state in the file `memory`: one line, without NUL.

    Variables named `given` keep their values of this call, with `cwd` its directory, too.
    The new state goes to `memory`.new; `memory`.moved says that the old directory is gone.
    """
    new, moved = (_quoted(f"{memory}.{name}".encode()) for name in ("new", "moved"))
    names = " ".join(given).encode()
    trap = _TRAP.encode().replace(b"@SAVER@", _quoted(saver(memory).encode()))
    trap = trap.replace(b"@NEW@", new).replace(b"@GIVEN@", names)
    hook = _HOOK.encode().replace(b"@GIVEN@", names).replace(b"@MOVED@", moved)
    hook = hook.replace(b"@CWD@", b"y" * cwd or b"''")
    parts = {
        b"@VERBOSE@": b"y" if b"set -" in code and b"v" in code else b"''",
        b"@MEMORY@": _quoted(memory.encode()),
        b"@QUOTED@": _quoted(trap),
        b"@TRAP@": trap,
        b"@HOOK@": _quoted(hook),
        b"@CODE@": _quoted(code),
    }
    whole = _WHOLE.encode()
    for name, part in parts.items():
        whole = whole.replace(name, part)
    return whole


def _quoted(value: bytes) -> bytes:
    """Quote as one word of bash, on one line."""
    for plain, escaped in ((b"\\", b"\\\\"), (b"'", b"\\'"), (b"\n", b"\\n")):
        value = value.replace(plain, escaped)
    return b"$'%b'" % value
