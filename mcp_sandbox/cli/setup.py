"""What is set up once: agents (`init …`), images, tokens of HTTP users, objects of a cluster."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from mcp_sandbox import __version__
from mcp_sandbox.cli.options import (
    AsJson,
    Group,
    Yes,
    agreed,
    flag,
    given,
    lifetime,
    load,
    print_diff,
    table,
    tell,
    utc,
)
from mcp_sandbox.clients import files
from mcp_sandbox.clients.files import NAME, EntryPlace
from mcp_sandbox.config.environment import default_config_file, setting_variables
from mcp_sandbox.errors import ImageMissing
from mcp_sandbox.models import TokenScope

if TYPE_CHECKING:
    from mcp_sandbox.web.tokens import TokenFile, TokenInfo

init = Group(
    "Connect an agent: write the file in which it looks for servers.",
    epilog="Any other client: add what `mcp-sandbox init cursor --print` shows to its settings.",
)
images = Group("Build, list and check sandbox images.", "config")
tokens = Group("Make, list and revoke the tokens of HTTP users.", "data", "config")
cluster = Group("Print what a Kubernetes cluster gets once.", "config")

_FORBID = (
    "What needs your consent is asked of you. That it answers itself is forbidden by this line in "
    '"permissions" of .claude/settings.json:\n  '
    '"deny": ["Bash(mcp-sandbox approvals:*)", "Bash(mcp-sandbox egress allow:*)", '
    '"Bash(mcp-sandbox project accept:*)"]'
)
_EXPIRES = "How long it is valid, such as 12h or 30d; without it, until it is revoked."
_SCOPE = "mcp: the tools; control: the user's chats in the control API; platform: everybody's."
Undo = Annotated[bool, flag("Take back what this command wrote.", "--undo")]
Print = Annotated[bool, flag("Only print what belongs into the file.", "--print")]
Http = Annotated[str | None, given("--http", "URL", "Use a server at this address.")]
NoCheck = Annotated[bool, flag("Make no first call.", "--no-check")]


@init.command(name="claude")
def init_claude(
    *,
    for_user: Annotated[
        bool, flag("For all your projects, or for this folder.", "--user/--project")
    ] = False,
    http: Http = None,
    yes: Yes = False,
    undo: Undo = False,
    only_print: Print = False,
    no_check: NoCheck = False,
) -> None:
    """Connect Claude Code: each conversation gets a computer of its own."""
    if for_user and http:
        raise typer.BadParameter("--http names one chat, so it belongs to a project, not to --user")
    target = files.claude_of_user() if for_user else files.of_project("claude", http)
    how = {"yes": yes, "undo": undo, "only_print": only_print, "check": not no_check}
    _connect(target, **how, hint=_FORBID)


def _add(name: str, about: str, place: Callable[[str | None], EntryPlace]) -> None:
    """Add the command of a client; `place` is where it looks, given the address of a server."""

    @init.command(name=name, help=about)
    def command(
        *,
        http: Http = None,
        yes: Yes = False,
        undo: Undo = False,
        only_print: Print = False,
        no_check: NoCheck = False,
    ) -> None:
        _connect(place(http), yes=yes, undo=undo, only_print=only_print, check=not no_check)


for _client, _called in (("cursor", "Cursor"), ("vscode", "Visual Studio Code")):
    _about = f"Connect {_called}: this folder gets a computer."
    _add(_client, _about, partial(files.of_project, _client))
_add("inspector", "Connect MCP Inspector: it gets a computer to look at.", files.inspector)


def _connect(
    target: EntryPlace, *, yes: bool, undo: bool, only_print: bool, check: bool, hint: str = ""
) -> None:
    if only_print:
        print(json.dumps({target.section: {NAME: target.entry}}, indent=2))
        return
    wanted = files.plan_change(target, undo=undo)
    if wanted.is_none:
        print(f"{wanted.path} is as it should be")
    print_diff(wanted.diff())
    agreed(yes or wanted.is_none, "Write this?", "nothing was changed; --yes writes without asking")
    wanted.apply()
    if undo:
        return
    if hint:
        print(hint)
    if check:
        from mcp_sandbox.clients.first_call import first_call

        print(anyio.run(first_call, target.entry, Path.cwd()))
    print(f"Next: {target.next_step}")


@images.command()
def build(
    name: Annotated[str, typer.Argument(help="Which image to build.")] = "base",
    tag: Annotated[
        str | None, given("--tag", "NAME", "Name of the result, not mcp-sandbox/IMAGE.")
    ] = None,
    base: Annotated[
        str | None, given("--base", "NAME", "Image to build it on, not the usual one.")
    ] = None,
    ca_bundle: Annotated[
        Path | None, given("--ca-bundle", "FILE", "Certificates to trust while building.")
    ] = None,
    from_packages: Annotated[
        bool, flag("Make the Debian base here; needs root, mmdebstrap, npm.", "--from-packages")
    ] = False,
) -> None:
    """Build a sandbox image; it must be built again after an update of mcp-sandbox."""
    from mcp_sandbox.backends.docker import images as room

    progress = partial(print, file=sys.stderr, flush=True)
    builder = room.ImageBuilder(load().config.docker, progress, ca_bundle, from_packages)
    print(f"built {anyio.run(partial(builder.build, name, tag=tag, base=base))}")


@images.command(name="list")
def list_images(as_json: AsJson = False) -> None:
    """List the sandbox images of the engine."""
    from mcp_sandbox.backends.docker import images as room
    from mcp_sandbox.backends.docker.engine import build_again

    rows = anyio.run(room.list_images, load().config.docker)
    cells = (
        (
            row.name,
            row.id.removeprefix("sha256:")[:12],
            f"{row.size_mb} MB",
            "current" if row.current else f"outdated; {build_again(row.name)}",
        )
        for row in rows
    )
    columns = ("image", "id", "size", "runner")
    none = "no images: `mcp-sandbox images build` makes one"
    tell([asdict(row) for row in rows], table(*columns, rows=cells), as_json=as_json, none=none)


@images.command()
def check(
    name: Annotated[
        str | None, typer.Argument(help="Which image.", show_default="docker.image")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run an image once, and print the version of each tool that it should have."""
    from mcp_sandbox.backends.docker import images as room
    from mcp_sandbox.backends.docker.engine import build_again

    settings = load().config.docker
    if name:
        image = room.name_image(name) if name in room.image_folders() else name
        settings = settings.model_copy(update={"image": image})
    found = anyio.run(room.check, settings)
    current = [row.name for row in anyio.run(room.list_images, settings) if row.current]
    shown = ((tool, version or "missing") for tool, version in found.items())
    tell(found, table("tool", "version", rows=shown), as_json=as_json)
    missing = [tool for tool, version in found.items() if not version]
    problem = f"lacks {', '.join(missing)}" if missing else ""
    if settings.image not in current:
        problem = "was built by another version"
    if problem:
        raise ImageMissing(f"{settings.image} {problem}; {build_again(settings.image)}")


@tokens.command()
def add(
    user: Annotated[str, typer.Argument(help="Whose chats the token opens.")],
    expires: Annotated[float | None, given("--expires", "TIME", _EXPIRES, parser=lifetime)] = None,
    scope: Annotated[TokenScope, given("--scope", "SCOPE", _SCOPE)] = "mcp",
    as_json: AsJson = False,
) -> None:
    """Make a token for a user and print it: this once, as only its hash is kept."""
    token, secret = _tokens().add(user, expires, scope)
    until = "it is revoked" if token.expires is None else utc(token.expires)
    about = f"token {token.id} of {user}, valid until {until}; it is not shown again:"
    print(about, file=sys.stderr)
    tell({**_row(token), "token": secret}, secret, as_json=as_json)


@tokens.command(name="list")
def list_tokens(as_json: AsJson = False) -> None:
    """List the tokens: whose they are and how long they are valid, never the tokens."""
    rows = [_row(token) for token in _tokens().read()]
    cells = (
        (
            *(each[name] for name in ("id", "user", "scope", "created")),
            (each["expires"] or "-") + note,
        )
        for each in rows
        for note in [" (expired)" if each["expired"] else ""]
    )
    output = table("token", "user", "scope", "created", "expires", rows=cells)
    tell(rows, output, as_json=as_json, none="no tokens: `mcp-sandbox token add USER` makes one")


def _row(token: "TokenInfo") -> dict[str, Any]:
    times = {"created": utc(token.created), "expires": token.expires and utc(token.expires)}
    known = token.model_dump(include={"id", "user", "scope"})
    return {**known, **times, "expired": token.expired(time.time())}


@cluster.command()
def manifests(
    chats: Annotated[
        int, given("--chats", "N", "How many sandboxes the quota allows.", min=1)
    ] = 100,
    warm: Annotated[int, given("--warm", "N", "How many wait in kubernetes.warm_pool.", min=0)] = 3,
    replicas: Annotated[
        int, given("--replicas", "N", "How many servers, with fleet.redis.", min=1)
    ] = 2,
    image: Annotated[
        str, given("--image", "NAME", "The server's image, of images/server/Dockerfile.")
    ] = "mcp-sandbox/server:latest",
    helm: Annotated[
        Path | None, given("--helm", "FOLDER", "Write a chart there, with these as its values.")
    ] = None,
) -> None:
    """Print YAML for `kubectl apply -f -`: Role, server, quota, NetworkPolicies and warm pool.

    The server gets the file of settings, and the one of kubernetes.template, as a ConfigMap. They
    hold no secrets, but name some as env:NAME, which come from a Secret mcp-sandbox-server.
    """
    import yaml

    from mcp_sandbox.backends.kubernetes.manifests import Values, write_chart
    from mcp_sandbox.backends.kubernetes.manifests import manifests as render

    settings = load().config
    file = Path(setting_variables().get("MCP_SANDBOX_CONFIG") or default_config_file())
    text = file.read_text() if file.exists() else ""
    if helm:
        numbers = {"chats": chats, "warm": warm, "replicas": replicas}
        values = {"image": image, **numbers, "settings": text}
        try:
            write_chart(settings, helm, __version__, values)
        except OSError as exc:
            raise typer.BadParameter(f"{exc.filename}: {exc.strerror}: name a folder") from exc
        print(f"wrote a chart to {helm}: helm install mcp-sandbox {helm} -n NAMESPACE")
        return
    # Those that try the network, and the server itself, come beside.
    quota = f"{chats + warm + 10}", f"{chats + 1}"
    named = Values(settings.kubernetes.namespace, image, text, *quota, warm, replicas)
    print(yaml.safe_dump_all(render(settings, named), sort_keys=False))


@cluster.command()
def seccomp() -> None:
    """Print the filter of system calls, for the nodes' kubernetes.seccomp_profile."""
    from mcp_sandbox.backends.docker.spec import profile

    print(json.dumps(profile(), indent=2))


@tokens.command()
def revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="Its id, or how it begins.")],
) -> None:
    """Revoke a token: it is refused from now on, by a running server too."""
    revoked = _tokens().revoke(token)
    print(f"revoked {revoked.id} of {revoked.user}")


def _tokens() -> "TokenFile":
    from mcp_sandbox.web.tokens import TokenFile

    return TokenFile(load().config.data_dir)
