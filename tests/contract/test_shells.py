"""A shell remembers what its commands have changed, and nothing else of it can be seen."""

import re
from typing import NamedTuple

import anyio
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mcp_sandbox.errors import Busy, InvalidArgument
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.contract.conftest import CHAT

KEPT = "remembers nothing of this command"
MEMORY = "~/.mcp-sandbox/shells"


class Case(NamedTuple):
    """Commands of one shell, and what the last of them prints and ends with."""

    commands: list[str]
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = 0


CASES = {
    "the directory": Case(["cd /tmp", "pwd"], "/tmp\n"),
    "a directory with an odd name": Case(
        ["mkdir -p $'a b\\n\"c'; cd $'a b\\n\"c'", 'basename "$PWD"'], 'a b\n"c\n'
    ),
    "the directory before": Case(
        ["cd /tmp; cd /usr", "true", "cd -; echo $OLDPWD"], "/tmp\n/usr\n"
    ),
    "the stack of directories": Case(
        ["cd /usr; pushd /tmp; pushd /etc", "dirs; popd; popd"], "/etc /tmp /usr\n/tmp /usr\n/usr\n"
    ),
    "a directory whose variable lies": Case(["cd /tmp; PWD=/nonsense", "pwd"], "/tmp\n"),
    "a variable": Case(["x=5", "echo $x"], "5\n"),
    "an exported variable": Case(["export x=5", "env | grep ^x="], "x=5\n"),
    "one that is not exported": Case(["x=5", "env | grep ^x="], exit_code=1),
    "an integer": Case(["declare -i n=3", "n+=4; echo $n"], "7\n"),
    "a constant": Case(
        ["readonly r=1", "r=2; echo on"], "", "bash: line 1: r: readonly variable\n", 1
    ),
    "an array": Case(
        ["a=(1 'b c' $'d\\ne'); a[9]=z", 'echo ${#a[@]} "${a[1]}" "${a[2]}" ${!a[@]}'],
        "4 b c d\ne 0 1 2 9\n",
    ),
    "an associative array": Case(
        ["declare -A m=([k]=v ['a b']=$'\\n' [\"q'\"]=1)", 'echo ${#m[@]} ${m[k]} "${m["q\'"]}"'],
        "3 v 1\n",
    ),
    "a declared associative array": Case(["declare -A m", "m[x]=1; m[y]=2; echo ${#m[@]}"], "2\n"),
    "a declared integer": Case(["declare -i n", "n=3+4; echo $n"], "7\n"),
    "a declared array": Case(["declare -a n", "declare -p n"], "declare -a n\n"),
    "a reference": Case(["x=5; declare -n r=x", "r=6; echo $x"], "6\n"),
    "upper and lower case": Case(
        ["declare -u U; declare -l L=ABC", "U=abc; echo $U $L"], "ABC abc\n"
    ),
    "newlines and quotes": Case(
        ["v=$'a\\n\\'b\\'\"c\" $x `y` \\\\'", "printf '%s|' \"$v\""], "a\n'b'\"c\" $x `y` \\|"
    ),
    "bytes that are no text": Case(
        ["v=$'\\xff\\xfe\\x01\\x7f\\t\\r'", 'printf %s "$v" | od -An -tx1'], " ff fe 01 7f 09 0d\n"
    ),
    "letters of other languages": Case(["v=é", "echo $v"], "é\n"),
    "an integer that was a text": Case(
        ["y=; declare -i y", 'echo "[$y]"; y=1+1; echo $y'], "[]\n2\n"
    ),
    "lower case that was upper case": Case(
        ["L=A; declare -l L", "echo $L; L=B; echo $L"], "A\nb\n"
    ),
    "a constant array of integers from a function": Case(
        ["f() { a=(x); declare -gair a; exit; }; f", "declare -p a"], 'declare -air a=([0]="x")\n'
    ),
    "an empty variable": Case(["x=", "echo ${x+set}"], "set\n"),
    "what is unset": Case(["x=5", "unset x", "echo ${x-gone}"], "gone\n"),
    "what is unset of the environment": Case(["unset PAGER", "echo ${PAGER-gone}"], "gone\n"),
    "what is no longer exported": Case(["export -n PAGER", "env | grep ^PAGER"], exit_code=1),
    "the path": Case(["PATH=$PATH:/opt/x", "echo ${PATH##*:}"], "/opt/x\n"),
    "the locale": Case(["export LC_ALL=C; v=$'\\xc3\\xa9'", "echo ${#v}"], "2\n"),
    "options read": Case(["set -- -a -b; getopts ab o", "echo $OPTIND"], "2\n"),
    "a function": Case(['f() { echo "f $1"; }', "f 1"], "f 1\n"),
    "a function with a here-document": Case(["f() { cat <<X\na $1\nX\n}", "f 1"], "a 1\n"),
    "an exported function": Case(["f() { echo in; }; export -f f", "bash -c f"], "in\n"),
    "a constant function": Case(
        ["f() { echo in; }; readonly -f f", "f() { echo other; }; f"],
        "in\n",
        "bash: line 1: f: readonly function\n",
    ),
    "a function with an odd name": Case(["my-f.x() { echo odd; }", "my-f.x"], "odd\n"),
    "a function with wide patterns": Case(
        ["shopt -s extglob\nf() { case $1 in @(a|b)) echo yes;; esac; }", "f a"], "yes\n"
    ),
    "a function for what is not found": Case(
        ['command_not_found_handle() { echo "no $1"; }', "true", "nono"], "no nono\n"
    ),
    "a function called cd": Case(
        ['cd() { echo mine; builtin cd "$@"; }; cd /tmp', "pwd; cd /usr; pwd"], "/tmp\nmine\n/usr\n"
    ),
    "a function called exit": Case(
        ["exit() { echo mine; }; x=1", "exit 3; echo $x", "exit; false"], "mine\n", exit_code=1
    ),
    "a function called trap": Case(["trap() { echo m; }; x=1", "x=2", "trap; echo $x"], "m\n2\n"),
    "a function called declare": Case(
        ["declare() { echo m; }; z() { echo z; }; x=1", "x=2", "declare; echo $x; z"], "m\n2\nz\n"
    ),
    "a function called builtin": Case(["builtin() { echo m; }; x=1", "x=2", "echo $x"], "2\n"),
    "a function called eval": Case(["eval() { echo m; }; x=1", "echo $x"], "1\n"),
    "functions called as all that is used": Case(
        [
            "for f in printf shopt unalias mapfile umask export pushd hash command unset set; "
            'do . /dev/stdin <<< "$f() { echo m; }"; done; x=1',
            "x=2",
            "echo $x; pushd",
        ],
        "2\nm\n",
    ),
    "an alias": Case(["alias ll='echo long'", "ll 1"], "long 1\n"),
    "an alias with quotes": Case(["alias q='echo \"a b\" '\\''c'\\'''", "q"], "a b c\n"),
    "an alias in a function, once": Case(
        ["alias e='echo x'\nf() { e a; }; alias echo='echo y'", "true", "true", "f"], "x a\n"
    ),
    "what is no alias any more": Case(["alias ll=ls", "unalias ll", "alias"]),
    "an option": Case(["set -o pipefail", "false | true"], exit_code=1),
    "an option that is off": Case(["set +o braceexpand", "echo {a,b}"], "{a,b}\n"),
    "no globbing": Case(["set -f", "echo /*"], "/*\n"),
    "exporting all": Case(["set -a", "y=1", "env | grep -c -e ^y= -e _mcp"], "1\n"),
    "no clobbering": Case(
        ["set -C; echo a > f", "x=2", "echo b >> f; echo $x; cat f"], "2\na\nb\n"
    ),
    "an option of the shell": Case(["shopt -s nullglob", "echo [x]nothing*"], "\n"),
    "one that is off": Case(["shopt -u sourcepath", "shopt -q sourcepath"], exit_code=1),
    "failing globs": Case(["shopt -s failglob", "true", "echo ok"], "ok\n"),
    "case that does not count": Case(["shopt -s nocasematch", "[[ A == a ]] && echo y"], "y\n"),
    "posix mode": Case(
        ["set -o posix; x=1", "if", "echo $x; shopt -po posix"], "1\nset -o posix\n"
    ),
    "posix mode, left": Case(
        ["set -o posix", "set +o posix", "shopt -po posix"], "set +o posix\n", "", 1
    ),
    "job control": Case(["set -m; x=1", "echo $x; shopt -po monitor"], "1\nset -o monitor\n"),
    "history": Case(["set -o history; x=1", "echo $x"], "1\n"),
    "the mask": Case(["umask 077", "umask"], "0077\n"),
    "a separator that bash uses itself": Case(
        ["declare -A m=(); IFS=$'\\1'", "declare -p m IFS"],
        "declare -A m=()\ndeclare -- IFS=$'\\001'\n",
    ),
    "changed separators": Case(["IFS=,", "x=a,b; printf '%s|' $x"], "a|b|"),
    "no separators": Case(["IFS=", "x='a b'; printf '%s|' $x"], "a b|"),
    "unset separators": Case(["unset IFS", "x='a b'; printf '%s|' $x"], "a|b|"),
    "what was before an exit": Case(["x=5; exit 3", "echo $x"], "5\n"),
    "an exit": Case(["x=5", "exit 3"], exit_code=3),
    "an exit in functions with variables of their own": Case(
        [
            "x=1; f() { local IFS=, x=2 z; g; }; g() { local x=3; exit 5; }; f",
            'echo "$x[$IFS]${z-}"',
        ],
        "1[ \t\n]\n",
    ),
    "exits of subshells": Case(["x=1; (x=2; exit 3); y=$(exit 4)", "echo $x"], "1\n"),
    "a return": Case(["x=1; return 3 2>/dev/null", "echo $x"], "1\n"),
    "a break": Case(["break; x=1", "echo $x"], "1\n"),
    "set -e": Case(["set -e; x=1; false; x=2", "echo $x; false; echo on"], "1\non\n"),
    "set -u": Case(["set -u; x=1; echo $no; x=2", "echo $x"], "1\n"),
    "set -u goes on": Case(
        ["set -u; x=1", "echo $x $no"], "", "bash: line 1: no: unbound variable\n", 127
    ),
    "set -x": Case(["set -x", "x=1; echo $x"], "1\n", "+ x=1\n+ echo 1\n"),
    "set -x and an exit": Case(["set -x; exit 4"], "", "+ exit 4\n", 4),
    "set -x and a failure": Case(["set -x; false"], "", "+ false\n", 1),
    "set -x and functions": Case(["f() { echo in; }; set -x", "f"], "in\n", "+ f\n+ echo in\n"),
    "set -x into a file": Case(
        ["set -x", "exec 7>t; BASH_XTRACEFD=7; exit 3", "set +x; tail -c 7 t"],
        "exit 3\n",
        "+ set +x\n",
    ),
    "set -v and an exit": Case(["set -v\nexit 4"], "", "exit 4\n", 4),
    "set -v and a failure": Case(["set -v", "true\nfalse"], "", "false\n", 1),
    "set -v and a later exit": Case(["set -v", "true\nexit 4"], "", "exit 4\n", 4),
    "set -xv": Case(["set -xv", "true\nfalse"], "", "+ true\nfalse\n+ false\n", 1),
    "what PS4 says": Case(["PS4='> '; set -x", "true"], "", "> true\n"),
    "a trap of each command": Case(["trap 'echo D' DEBUG; true", "echo $-"], "hBc\n"),
    "what a trap of each command prints": Case(["trap 'echo D' DEBUG; true"], "D\n"),
    "what a trap of failures prints": Case(["trap 'echo E' ERR; false"], "E\n", exit_code=1),
    "an open quote": Case(["x=1; set -o pipefail", "x=2; echo 'open", "echo $x$-"], "1hBc\n"),
    "an open quote on a later line": Case(["x=1\necho 'open", "echo $x"], "1\n"),
    "an open here-document": Case(["x=1; cat <<A\nhi", "echo $x"], "1\n"),
    "a here-document": Case(["x=1", "cat <<A\n$x\nA"], "1\n"),
    "an empty command": Case(["x=1", " ", "echo $x"], "1\n"),
    "a comment": Case(["x=1\n# whole", "# nothing", "echo $x"], "1\n"),
    "values like our own marks": Case(
        ["x=$'\\n# whole\\n@TRAP@'", 'echo "$x"'], "\n# whole\n@TRAP@\n"
    ),
    "reading what is not given": Case(["x=1", "cat; read y; echo $x"], "1\n"),
    "output into a file": Case(["x=1; exec >o; echo in", "echo $x; cat o"], "1\nin\n"),
    "errors into nothing": Case(
        ["x=1; exec 2>/dev/null; no", "echo $x; no"],
        "1\n",
        "bash: line 1: no: command not found\n",
        127,
    ),
    "closed streams": Case(["x=1; exec 1>&- 2>&- 0<&-", "echo $x"], "1\n"),
    "what a trap of its own prints": Case(
        ["x=1", "trap 'echo bye $?; echo err >&2' EXIT; (exit 3)"], "bye 3\n", "err\n", 3
    ),
    "a trap of its own": Case(["x=1; trap 'echo bye' EXIT", "echo $x"], "1\n"),
    "what a trap of its own finds": Case(
        ["x=1; IFS=,; trap 'y=a,b; echo $y $x ${HOME+h}' EXIT"], "a b 1 h\n"
    ),
    "a signal that bash handles": Case(["x=1; kill -TERM $$", "echo $x"], "1\n"),
    "the lines of messages": Case(
        ["x=1", "echo\nno\n\nno2"],
        "\n",
        "bash: line 2: no: command not found\nbash: line 4: no2: command not found\n",
        127,
    ),
    "nothing of ours": Case(
        ["x=1", "set | grep -c _mcp; declare -F; compgen -v _mcp; alias"],
        "0\n",
    ),
}


@pytest.fixture
def manager(lasting: SessionManager) -> SessionManager:
    return lasting


@pytest.fixture
def session(emptied: Session) -> Session:
    return emptied


@pytest.mark.parametrize("name", CASES)
async def test_a_shell_keeps(session: Session, name: str) -> None:
    case = CASES[name]
    for command in case.commands:
        result = await session.exec(command, shell="a")
        assert KEPT not in "".join(result.shell)
    # How deep bash is within itself is not what a command prints.
    stderr = re.sub(r"^([+>])\1+", r"\1", result.stderr, flags=re.MULTILINE)
    assert (result.stdout, stderr) == (case.stdout, case.stderr)
    assert result.exit_code == case.exit_code


@pytest.mark.parametrize(
    "command",
    [
        "x=2; exec true",
        "x=2; kill -9 $$",
        "x=2; trap 'true' EXIT; exit 3",
        "x=2; big=$(head -c 4200000 /dev/zero | tr '\\0' a)",
        "x=2; sleep 60",
        "x=2; ulimit -f 0",
    ],
)
async def test_what_leaves_no_memory_leaves_the_one_before_and_is_told(
    session: Session, command: str
) -> None:
    await session.exec("x=1", shell="a")
    told = await session.exec(command, shell="a", timeout_s=1)
    assert KEPT in "".join(told.shell)
    result = await session.exec("echo $x", shell="a")
    assert (result.stdout, result.shell) == ("1\n", ())


async def test_who_kills_everything_keeps_the_memory_of_before_and_is_told(
    session: Session, backend_name: str
) -> None:
    if backend_name == "docker-runsc":
        pytest.skip("gVisor does not shield pid 1: the sandbox dies")
    await session.exec("x=1", shell="a")
    told = await session.exec("x=2; kill -9 -1; echo done", shell="a")
    assert (told.stdout, told.exit_code) == ("done\n", 0)
    assert KEPT in "".join(told.shell)
    assert (await session.exec("echo $x", shell="a")).stdout == "1\n"


async def test_a_new_shell_says_that_it_is_new_and_one_that_was_there_does_not(
    session: Session,
) -> None:
    assert "is new" in "".join((await session.exec("true", shell="a")).shell)
    assert (await session.exec("true", shell="a")).shell == ()
    assert "is new" in "".join((await session.exec("true", shell="..")).shell)


async def test_directory_and_variables_that_are_given_stay(session: Session) -> None:
    await session.exec("mkdir 'a b'")
    await session.exec("true", shell="a", cwd="/tmp", env={"G": "a\n'b'", "PAGER": "p"})
    said = await session.exec(
        'pwd; echo "$G $PAGER"; env | grep -c ^G=; cd -', shell="a", cwd="a b"
    )
    assert said.stdout == "/workspace/a b\na\n'b' p\n1\n/tmp\n".replace(
        "/workspace", (await session.exec("pwd")).stdout.strip()
    )
    assert (await session.exec("echo $G", shell="a", env={"G": "2"})).stdout == "2\n"
    assert (await session.exec("unset G; pwd", shell="a")).stdout == "/tmp\n"
    assert (await session.exec("echo [$G]", shell="a")).stdout == "[]\n"


async def test_a_command_of_a_shell_has_the_descriptors_of_every_command(session: Session) -> None:
    await session.exec("set -v", shell="a")
    opened = await session.exec("ls -m /proc/self/fd 2>/dev/null", shell="a")
    assert opened.stdout == (await session.exec("ls -m /proc/self/fd 2>/dev/null")).stdout


async def test_a_directory_that_is_gone_is_told_and_the_command_begins_in_the_workspace(
    session: Session,
) -> None:
    workspace = (await session.exec("pwd")).stdout
    await session.exec("mkdir d; cd d; x=1; rmdir $PWD", shell="a")
    result = await session.exec("echo $x; pwd", shell="a")
    assert result.stdout == f"1\n{workspace}"
    assert "is gone" in "".join(result.shell)
    assert (await session.exec("pwd", shell="a")).shell == ()


async def test_input_reaches_a_command_of_a_shell(session: Session) -> None:
    await session.exec("read x; cat", shell="a", stdin="one\ntwo\n")
    assert (await session.exec("echo $x; cat", shell="a", stdin="in")).stdout == "one\nin"


@pytest.mark.parametrize(
    "plant",
    [
        "echo x=2 > M/a.sh",
        "head -c 5000000 /dev/zero > M/a.sh",
        "rm M/a.sh; ln -s /dev/zero M/a.sh",
        "rm M/a.sh; ln -s ~/other M/a.sh; echo '# whole' > ~/other",
        "rm M/a.sh; mkfifo M/a.sh",
        "truncate -s -3 M/a.sh",
    ],
)
async def test_a_memory_that_is_broken_begins_anew_and_is_told(
    session: Session, plant: str
) -> None:
    await session.exec("x=1", shell="a")
    await session.exec(plant.replace("M", MEMORY))
    result = await session.exec("echo [$x]; x=3", shell="a", timeout_s=10)
    assert (result.stdout, result.exit_code) == ("[]\n", 0)
    assert "damaged" in "".join(result.shell)
    assert (await session.exec("echo $x", shell="a")).stdout == "3\n"


async def test_what_is_planted_where_a_memory_is_written_harms_nothing(session: Session) -> None:
    await session.exec("x=1", shell="a")
    await session.exec(f"cd {MEMORY}; mkfifo a.sh.new; ln -s /etc/passwd a.sh.moved")
    await session.exec(f"cd {MEMORY}; rm save.bash; ln -s ~/x save.bash; echo 'echo no' > ~/x")
    assert (await session.exec("echo $x; x=2", shell="a", timeout_s=10)).stdout == "1\n"
    assert (await session.exec("echo $x", shell="a", timeout_s=10)).stdout == "2\n"
    await session.exec(f"rm -r {MEMORY}; echo > {MEMORY}")
    with pytest.raises(Exception, match="no shell can be kept"):
        await session.exec("true", shell="a")
    assert (await session.exec("echo ok")).stdout == "ok\n"


async def test_a_shell_runs_one_command_at_a_time_and_others_run_beside_it(
    session: Session,
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: session.exec("mkfifo go; cat go; x=1", shell="a"))
        with anyio.fail_after(20):
            await session.exec("until [ -p go ]; do sleep 0.01; done", shell="b")
        with pytest.raises(Busy, match="busy with"):
            await session.exec("true", shell="a")
        await session.exec("echo > go", shell="b")
    assert (await session.exec("echo $x", shell="a")).stdout == "1\n"


@pytest.mark.parametrize("name", ["../x", "", "a" * 33, "a b", "a\n", "é"])
async def test_what_is_no_name_is_refused(session: Session, name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"shell takes 1 to 32"):
        await session.exec("true", shell=name)


async def test_a_shell_takes_command_lines_alone(session: Session) -> None:
    with pytest.raises(InvalidArgument, match="shell takes a command line"):
        await session.exec(["true"], shell="a")


async def test_a_shell_outlives_its_sandbox(manager: SessionManager) -> None:
    session = await manager.session(CHAT)
    await session.exec("cd /tmp; x=1; f() { echo $x; }", shell="long")
    await session.reset()
    assert (await session.exec("f; pwd", shell="long")).stdout == "1\n/tmp\n"


NAMES = st.sampled_from(["x", "y", "IFS", "PS4"])
TEXTS = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=12)


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


LINES = st.one_of(
    st.builds(lambda n, v: f"{n}={quoted(v)}", NAMES, TEXTS),
    st.builds(lambda n, v: f"{n}+=({quoted(v)} b)", st.just("a"), TEXTS),
    st.builds(lambda k, v: f"m[_{quoted(k)}]={quoted(v)}", TEXTS, TEXTS),
    st.builds(lambda v: f"f() {{ printf '%s\\n' {quoted(v)} \"$1\"; }}", TEXTS),
    st.builds(lambda v: f"alias k={quoted('echo ' + quoted(v))}", TEXTS),
    st.builds(lambda n: f"unset {n}", NAMES),
    st.builds(lambda n: f"export {n}", NAMES),
    st.sampled_from(
        [
            *("cd /tmp", "cd /usr/bin", "cd - >&2", "pushd / >&2", "umask 027", "set -f", "set +f"),
            *("false", "set -k", "shopt -s nullglob", "set -u", "set +u", "f 1", "k 1"),
            *("(x=1; cd /)", "declare -i y", "declare -l x"),
        ]
    ),
)
SHOWN = (
    "declare -p x y a m IFS LANG PS4 PWD; declare -f; alias; umask; shopt -p; dirs; "
    "echo $-; env | sort | grep -v ^_="
)


@given(st.lists(st.lists(LINES, min_size=1, max_size=3).map("\n".join), min_size=1, max_size=5))
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
async def test_a_shell_is_like_one_bash_that_lives(session: Session, commands: list[str]) -> None:
    commands = ["declare -A m=(); shopt -s expand_aliases", *commands, SHOWN]
    await session.exec(f"rm -rf {MEMORY}")
    results = [await session.exec(command, shell="h") for command in commands]
    long = "shopt -s expand_aliases\n" + "\n".join(f"eval {quoted(each)}" for each in commands)
    once = await session.exec(long)
    # An integer that is given no number ends a bash.
    assume("PWD=" in once.stdout)
    assert "".join(each.stdout for each in results) == once.stdout
    assert (results[-1].exit_code) == once.exit_code
