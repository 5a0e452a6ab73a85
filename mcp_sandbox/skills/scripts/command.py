"""What a command with its arguments needs. Pure."""

import re
from collections.abc import Sequence

from mcp_sandbox.skills.scripts.uses import DYNAMIC, Uses, Weight, names

_PROGRAM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}")
_BUILTINS = names(
    ". : [ [[ alias bg bind break builtin caller case cd command compgen complete compopt continue "
    "coproc declare dirs disown do done echo elif else enable esac eval exec exit export false fc "
    "fg fi for function getopts hash help history if in jobs kill let local logout mapfile popd "
    "printf pushd pwd read readarray readonly return select set shift shopt source suspend test "
    "then time times trap true type typeset ulimit umask unalias unset until wait while"
)
# Programs that run the rest of their line; the number of own arguments after the options.
_WRAPPERS = {
    "sudo": 0, "env": 0, "nohup": 0, "exec": 0, "command": 0, "builtin": 0, "time": 0, "nice": 0,
    "xargs": 0, "timeout": 1, "stdbuf": 0, "setsid": 0, "watch": 0, "doas": 0, "ionice": 0,
    "then": 0, "do": 0, "else": 0,
}  # fmt: skip
_NEEDED_THEMSELVES = frozenset(
    {"sudo", "env", "nohup", "nice", "xargs", "timeout", "stdbuf", "setsid", "watch", "doas"}
)
# Options of the wrappers that take the next word.
_TAKES_WORD = {
    "sudo": {"-u", "-g", "-C", "-D", "-h", "-p"}, "env": {"-u", "-C", "--unset", "--chdir"},
    "nice": {"-n"}, "timeout": {"-s", "-k", "--signal", "--kill-after"}, "watch": {"-n"},
    "xargs": {"-n", "-I", "-P", "-L", "-d", "-E", "-s", "-a"}, "stdbuf": {"-i", "-o", "-e"},
    "ionice": {"-c", "-n", "-p"},
}  # fmt: skip
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
_PYTHONS = re.compile(r"python(?:[23](?:\.\d+)?)?")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=.*", re.DOTALL)
_MODULE = re.compile(r"[A-Za-z_][\w.]*")
_INSTALLS = {
    ("pip", "install"), ("pip3", "install"), ("npm", "install"), ("npm", "i"), ("npm", "ci"),
    ("npm", "add"), ("yarn", "add"), ("pnpm", "add"), ("pnpm", "install"), ("yarn", "install"),
    ("bun", "add"), ("bun", "install"), ("uv", "add"), ("uv", "sync"), ("apt-get", "install"),
    ("apt", "install"), ("apk", "add"), ("dnf", "install"), ("yum", "install"),
    ("cargo", "install"), ("go", "install"), ("gem", "install"), ("conda", "install"),
    ("git", "clone"), ("git", "fetch"), ("git", "pull"), ("git", "push"), ("docker", "pull"),
}  # fmt: skip
_PACKAGES_OF = frozenset({"pip", "pip3", "npm", "yarn", "pnpm", "bun"})


def read_command(words: Sequence[str], uses: Uses, weight: Weight = "always") -> None:
    """Note what a command needs; `words` have DYNAMIC where they are not known."""
    for word in words:
        uses.text(word)
    rest = list(words)
    for _ in range(10):
        rest = _without_assignments(rest)
        if not rest or DYNAMIC in rest[0]:
            return
        name = rest[0]
        if name not in _WRAPPERS:
            _program(name, rest[1:], uses, weight)
            return
        if name == "command" and rest[1:2] and rest[1][:2] in ("-v", "-V"):
            return
        if name in _NEEDED_THEMSELVES:
            uses.need("command", name, weight)
        rest = _behind(name, rest[1:])


def _without_assignments(words: list[str]) -> list[str]:
    at = 0
    while at < len(words) and _ASSIGNMENT.fullmatch(words[at]):
        at += 1
    return words[at:]


def _behind(wrapper: str, words: list[str]) -> list[str]:
    at, takes = 0, _TAKES_WORD.get(wrapper, set())
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in takes else 1
    return _without_assignments(words[at:])[_WRAPPERS[wrapper] :]


def _program(name: str, words: list[str], uses: Uses, weight: Weight) -> None:
    if name.startswith(("/usr/", "/bin/", "/sbin/", "/opt/")):
        name = name.rsplit("/", 1)[-1]
    if name in _BUILTINS:
        _builtin(name, words, uses)
        return
    if not _PROGRAM.fullmatch(name) or name.isdecimal():
        return
    uses.need("command", name, weight)
    _network(name, words, uses)
    if name in _SHELLS:
        _inline("-c", words, uses)
    elif _PYTHONS.fullmatch(name):
        _python(words, uses, weight)
    elif name in ("node", "bun") and words[:1] in (["-e"], ["--eval"], ["-p"]) and words[1:]:
        uses.embed("javascript", words[1])
    elif name in ("npx", "bunx", "pnpx"):
        _npx(words, uses, weight)
    elif name in ("uv", "uvx", "pipx"):
        _uv(name, words, uses, weight)
    elif name == "find":
        _find(words, uses, weight)


def _builtin(name: str, words: list[str], uses: Uses) -> None:
    if name in ("eval", "trap") and words and DYNAMIC not in words[0]:
        uses.embed("shell", words[0])


def _inline(option: str, words: list[str], uses: Uses) -> None:
    for at, word in enumerate(words[:5]):
        if re.fullmatch(r"-[a-z]*c", word) and word.endswith(option[-1]) and words[at + 1 :]:
            uses.embed("shell", words[at + 1])
            return


def _python(words: list[str], uses: Uses, weight: Weight) -> None:
    for at, word in enumerate(words[:8]):
        if not word.startswith("-"):
            return
        after = words[at + 1] if at + 1 < len(words) else ""
        if word == "-c":
            uses.embed("python", after)
            return
        if word == "-m" and _MODULE.fullmatch(after):
            _module(after, words[at + 2 :], uses, weight)
            return


def _module(name: str, words: list[str], uses: Uses, weight: Weight) -> None:
    uses.need("python", name.partition(".")[0], weight)
    _network(name, words, uses)


def _npx(words: list[str], uses: Uses, weight: Weight) -> None:
    package = next((word for word in words if not word.startswith("-")), "")
    name = re.sub(r"(?<=.)@[^/]*$", "", package)
    if name and DYNAMIC not in name:
        uses.package(name)
        uses.need("npx", name, weight)


def _uv(name: str, words: list[str], uses: Uses, weight: Weight) -> None:
    if name == "uv" and words[:1] == ["run"]:
        rest = words[1:]
        while rest and rest[0].startswith("-"):
            if rest[0] == "--with" and rest[1:]:
                uses.package(re.split(r"[<>=~!\[]", rest[1])[0])
            rest = rest[2 if rest[0] in ("--with", "--python", "-p", "--from") else 1 :]
        if rest and not rest[0].endswith(".py"):
            read_command(rest, uses, weight)
    elif name == "uv" and words[:2] == ["pip", "install"]:
        _network("pip", words[1:], uses)


def _find(words: list[str], uses: Uses, weight: Weight) -> None:
    for at, word in enumerate(words):
        if word in ("-exec", "-execdir") and words[at + 1 :]:
            read_command(words[at + 1 : at + 30], uses, weight)
            return


def _network(name: str, words: list[str], uses: Uses) -> None:
    """Note installers, which need a network whatever they install."""
    plain = [word for word in words if not word.startswith("-")]
    if not plain or (name, plain[0]) not in _INSTALLS:
        return
    uses.need("network", f"{name} {plain[0]}", "sometimes")
    if name in _PACKAGES_OF:
        for word in plain[1:20]:
            uses.package(re.split(r"[<>=~!\[;\s]|(?<=.)@", word)[0])
