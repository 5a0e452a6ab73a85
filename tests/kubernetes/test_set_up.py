"""What an operator asks before there are chats: `doctor`, and the manifests of the server."""

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer import BadParameter

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.app.demo import show
from mcp_sandbox.backends.docker.spec import profile
from mcp_sandbox.backends.kubernetes.manifests import RIGHTS
from mcp_sandbox.backends.kubernetes.verify import read_template
from mcp_sandbox.cli.setup import manifests, seccomp
from mcp_sandbox.config import load_config
from mcp_sandbox.doctor.attack import attack
from mcp_sandbox.doctor.machine import Check, examine, examine_cluster, examine_place
from mcp_sandbox.errors import BackendUnavailable
from mcp_sandbox.models import ChatId
from tests.conftest import in_cluster
from tests.kubernetes import schema
from tests.kubernetes.cluster import Cluster

_ROOT = Path(__file__).parents[2]


def print_all(capsys: pytest.CaptureFixture[str], config: Path | None = None) -> list[Any]:
    manifests(chats=20, image="registry.example/server:1", config=config)
    return list(yaml.safe_load_all(capsys.readouterr().out))


def of(found: list[Check], name: str) -> Check:
    (check,) = [each for each in found if each.name == name]
    return check


def test_every_manifest_has_published_fields_and_none_is_for_the_whole_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = print_all(capsys)
    for each in found:
        assert not schema.find_error(each)
        assert each["metadata"]["namespace"] == "sandboxes"
    kinds = [each["kind"] for each in found]
    assert not [kind for kind in kinds if kind.startswith("Cluster")]
    assert {"Role", "Deployment", "Service", "ConfigMap", "ResourceQuota"} <= set(kinds)
    assert kinds.count("NetworkPolicy") == 3


def test_the_role_has_no_more_than_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    (role,) = [each for each in print_all(capsys) if each["kind"] == "Role"]
    told = {(rule["apiGroups"][0], rule["resources"][0]): rule["verbs"] for rule in role["rules"]}
    assert told == {key: list(verbs) for key, verbs in RIGHTS.items()}
    assert all("*" not in (*key, *verbs) for key, verbs in told.items())


def test_the_server_has_the_settings_and_the_template_of_the_operator(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, inside = tmp_path / "config.yaml", tmp_path / "inside"
    given = "{namespace: chats, context: mine, storage_class: fast, template: template.yaml}"
    file.write_text(f"kubernetes: {given}\nlimits: {{pids: 99}}\n")
    (tmp_path / "template.yaml").write_text("spec: {runtimeClassName: gvisor}\n")
    monkeypatch.setenv("MCP_SANDBOX_CONFIG", str(file))
    found = {each["kind"]: each for each in print_all(capsys)}
    assert found["Deployment"]["metadata"]["namespace"] == "chats"
    assert found["PersistentVolumeClaim"]["spec"]["storageClassName"] == "fast"
    inside.mkdir()
    for name, text in found["ConfigMap"]["data"].items():
        (inside / name).write_text(text)
    pod = found["Deployment"]["spec"]["template"]["spec"]
    # Else the cluster adds MCP_SANDBOX_SERVER_PORT, which is no setting.
    assert pod["enableServiceLinks"] is False
    (server,) = pod["containers"]
    settings = {each["name"]: each["value"] for each in server["env"] if each["name"] != "HOME"}
    moved = {k: v.replace("/etc/mcp-sandbox", str(inside)) for k, v in settings.items()}
    config = load_config(None, {}, moved).config
    cluster = config.kubernetes
    assert (config.backend, cluster.namespace, cluster.context) == ("kubernetes", "chats", "")
    assert read_template(cluster.template) == {"spec": {"runtimeClassName": "gvisor"}}
    assert config.limits.pids == 99
    # The folder of a volume is root's, who alone could add tokens then.
    assert "/srv/mcp-sandbox" in map(str, config.data_dir.parents)
    # By the address of its pod the server is not known.
    known = [{"name": "Host", "value": "localhost"}]
    assert server["readinessProbe"]["httpGet"]["httpHeaders"] == known
    assert server["livenessProbe"]["httpGet"]["httpHeaders"] == known


def render_chart(folder: Path, namespace: str) -> list[Any]:
    """What `helm template` makes of the few things that our chart uses."""
    values = yaml.safe_load((folder / "values.yaml").read_text())

    def fill(found: re.Match[str]) -> str:
        words, *filters = (each.split() for each in found[1].split("|"))
        known: dict[str, Any] = {".Release.Namespace": namespace, '"{{"': "{{", "10": 10, "1": 1}
        known |= {f".Values.{name}": value for name, value in values.items()}
        given = [known[word] for word in words if word != "add"]
        value = sum(given) if words[0] == "add" else given[0]
        return json.dumps(str(value)) if ["quote"] in filters else str(value)

    text = (folder / "templates" / "all.yaml").read_text()
    return list(yaml.safe_load_all(re.sub(r"\{\{ (.*?) \}\}", fill, text)))


def test_the_chart_says_what_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, chart = tmp_path / "config.yaml", tmp_path / "chart"
    pool = "{namespace: chats, storage: backups, warm_pool: warm}"
    file.write_text(f'backend: kubernetes\nkubernetes: {pool}\nenv: {{A: "b\'s {{c}}"}}\n')
    printed = print_all(capsys, file)
    manifests(chats=20, image="registry.example/server:1", config=file, helm=chart)
    assert yaml.safe_load((chart / "Chart.yaml").read_text())["apiVersion"] == "v2"
    assert render_chart(chart, "chats") == printed
    for each in printed:
        assert not schema.find_error(each)
    with pytest.raises(BadParameter, match="name a folder"):
        manifests(config=file, helm=file)


async def test_doctor_runs_code_in_a_pod_and_leaves_nothing(fake: Cluster, tmp_path: Path) -> None:
    config = in_cluster(tmp_path)
    found = await examine_place("kubernetes", config)
    assert {each.status for each in found} == {"ok"}
    assert (
        "uid 10001, no capabilities, the runtime's default seccomp" in of(found, "isolation").found
    )
    await fake.until(fake.is_empty)
    told = await examine_cluster(config)
    assert of(told, "rights").status == "ok"
    assert of(told, "system calls").status == "warn"
    assert "`mcp-sandbox kubernetes seccomp`" in of(told, "system calls").remedy


async def test_doctor_tries_the_cluster_that_is_configured_and_no_other_place(
    fake: Cluster, tmp_path: Path
) -> None:
    config = in_cluster(tmp_path)
    assert (await examine(config, config.data_dir / "absent.sock")).usable == ("kubernetes",)
    fake.token = "another"
    assert not (await examine(config, config.data_dir / "absent.sock")).usable


async def test_doctor_names_every_right_that_is_missing(fake: Cluster, tmp_path: Path) -> None:
    every = {(verb, resource) for (_, resource), verbs in RIGHTS.items() for verb in verbs}
    fake.forbidden |= every
    named = {"storage": "backups", "warm_pool": "warm"}
    found = of(await examine_cluster(in_cluster(tmp_path, **named)), "rights")
    assert found.status == "fail"
    assert all(f"{verb} {resource}" in found.found for verb, resource in every)
    assert "kubernetes manifests" in found.remedy


@pytest.mark.timeout(120)
async def test_an_attack_breaks_through_system_calls_alone_and_leaves_nothing(
    fake: Cluster, tmp_path: Path
) -> None:
    found = await attack(in_cluster(tmp_path), lambda _: None)
    broken = {each.group for each in found.results if each.verdict == "BROKEN"}
    assert broken == {"system calls"}
    await fake.until(fake.is_empty)


@pytest.mark.whole
async def test_the_demo_runs_in_a_cluster_and_leaves_nothing(
    fake: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, printed = in_cluster(tmp_path), StringIO()
    for name in ("endpoint", "bucket", "access_key", "secret_key"):
        monkeypatch.setenv(f"MCP_SANDBOX_STORAGE__{name.upper()}", getattr(config.storage, name))
    await show(config, Console(file=printed), None, keep=False)
    assert "nothing was left running" in printed.getvalue()
    await fake.until(fake.is_empty)


async def test_doctor_says_that_policies_are_not_enforced(fake: Cluster, tmp_path: Path) -> None:
    fake.node.enforces_policies = False
    fake.forget_trials()
    found = await examine_place("kubernetes", in_cluster(tmp_path))
    assert [each.status for each in found] == ["fail"]
    assert "does not enforce NetworkPolicies" in found[0].remedy


@pytest.mark.parametrize("enforces", [True, False])
async def test_what_an_open_network_reaches_is_said_as_it_was_tried(
    fake: Cluster, tmp_path: Path, enforces: bool
) -> None:
    fake.node.enforces_policies = enforces
    fake.forget_trials()
    config = in_cluster(tmp_path).model_copy(update={"network": "open"})
    found = of(await examine_place("kubernetes", config), "network")
    async with open_manager(config) as manager:
        session = await manager.session(ChatId("tester", "open"))
        told = (await session.info()).network
    if enforces:
        assert (found.status, "but for addresses of the cluster" in found.found) == ("ok", True)
        assert "but for addresses of the cluster" in told
    else:
        assert (found.status, "does not enforce" in found.found) == ("warn", True)
        assert "network plugin" in found.remedy
        assert "also to the cluster's own addresses" in told
        assert "but for" not in told


async def test_of_an_open_network_that_was_not_tried_nothing_is_claimed(
    fake: Cluster, tmp_path: Path
) -> None:
    config = in_cluster(tmp_path).model_copy(update={"network": "open"})
    async with open_manager(config) as manager:
        session = await manager.session(ChatId("tester", "open"))
        await session.exec("true")
        async with open_backend("kubernetes", config) as other:
            (info,) = await other.running()
            assert "not tried" in (await other.attach(info.id)).facts.network


def test_each_cell_of_what_happens_when_is_proved_by_a_test() -> None:
    page = (_ROOT / "docs" / "sandboxes.md").read_text()
    rows = re.findall(r"^\| (?!\|).*\|$", page.partition("### What happens when")[2], re.M)
    assert len(rows) == 6
    known = {
        name
        for file in (_ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    for row in rows:
        _, *cells, _ = row.split("|")[1:]
        assert len(cells) == 3
        for cell in cells:
            named = re.findall(r"test_\w+", cell.partition("<!--")[2])
            assert named, cell
            assert not {*named} - known


def test_nodes_get_the_filter_of_system_calls_that_containers_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seccomp()
    assert json.loads(capsys.readouterr().out) == profile()


async def test_where_pods_have_users_of_their_own_the_kernel_limits_their_processes(
    cluster: Cluster | None, data_root: Path, tmp_path: Path
) -> None:
    if cluster:
        pytest.skip("its pods have the users of this host")
    template = tmp_path / "pod.yaml"
    template.write_text("spec: {hostUsers: false}\n")
    config = in_cluster(data_root, template=template)
    limits = config.limits.model_copy(update={"pids": 64})
    async with open_manager(config.model_copy(update={"limits": limits})) as manager:
        session = await manager.session(ChatId("tester", "many"))
        try:
            await session.exec("true")
        except BackendUnavailable as exc:
            if "hostUsers" in str(exc):
                pytest.skip(str(exc))
            raise
        begun = "import subprocess\nfor _ in range(99): subprocess.Popen(['sleep', '9'])"
        assert "BlockingIOError" in (await session.run_code(begun)).stderr
        assert (await session.exec("echo on")).stdout == "on\n"
