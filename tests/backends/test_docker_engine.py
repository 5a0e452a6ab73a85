import hashlib
import json
from pathlib import Path

import pytest

from mcp_sandbox.backends.docker.engine import (
    Engine,
    Tls,
    explain_build,
    explain_refusal,
    explain_silence,
    find_engine,
    is_gvisor,
    refuse_unusable,
    shares_sockets,
)
from mcp_sandbox.errors import (
    BackendUnavailable,
    CapacityReached,
    ConfigError,
    ImageMissing,
    OperatorError,
)

INFO = {"OSType": "linux", "SecurityOptions": ["name=seccomp,profile=default"]}


def add_context(home: Path, name: str, host: str, *, tls: bool = False, skip: bool = False) -> None:
    digest = hashlib.sha256(name.encode()).hexdigest()
    meta = home / ".docker/contexts/meta" / digest / "meta.json"
    meta.parent.mkdir(parents=True)
    endpoint = {"Host": host, "SkipTLSVerify": skip}
    meta.write_text(json.dumps({"Name": name, "Endpoints": {"docker": endpoint}}))
    if tls:
        add_certificates(home / ".docker/contexts/tls" / digest / "docker")


def add_certificates(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (folder / name).touch()


def test_default_socket_is_used_when_nothing_is_set(tmp_path: Path) -> None:
    assert find_engine(None, {}, tmp_path) == Engine("unix:///var/run/docker.sock")


def test_configured_address_is_stronger_than_the_environment(tmp_path: Path) -> None:
    found = find_engine("tcp://a:1", {"DOCKER_HOST": "tcp://b:2"}, tmp_path)
    assert found == Engine("tcp://a:1")


def test_docker_host_is_stronger_than_any_context(tmp_path: Path) -> None:
    add_context(tmp_path, "far", "ssh://far")
    variables = {"DOCKER_HOST": "unix:///x", "DOCKER_CONTEXT": "far"}
    assert find_engine(None, variables, tmp_path) == Engine("unix:///x")


def test_context_variable_is_stronger_than_the_current_context(tmp_path: Path) -> None:
    add_context(tmp_path, "far", "ssh://me@far")
    add_context(tmp_path, "near", "tcp://near:2375")
    (tmp_path / ".docker/config.json").write_text('{"currentContext": "near"}')
    assert find_engine(None, {}, tmp_path).url == "tcp://near:2375"
    assert find_engine(None, {"DOCKER_CONTEXT": "far"}, tmp_path).url == "ssh://me@far"
    assert find_engine(None, {"DOCKER_CONTEXT": "default"}, tmp_path).is_local


def test_certificates_of_a_context_are_used(tmp_path: Path) -> None:
    add_context(tmp_path, "safe", "tcp://far:2376", tls=True)
    add_context(tmp_path, "loose", "tcp://far:2376", tls=True, skip=True)
    safe = find_engine(None, {"DOCKER_CONTEXT": "safe"}, tmp_path).tls
    assert safe is not None
    assert safe.verify
    assert safe.certificate is not None
    assert safe.certificate.is_file()
    loose = find_engine(None, {"DOCKER_CONTEXT": "loose"}, tmp_path).tls
    assert loose is not None
    assert not loose.verify


def test_certificates_of_the_environment_are_used_for_tcp_alone(tmp_path: Path) -> None:
    add_certificates(tmp_path / "certs")
    variables = {"DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": str(tmp_path / "certs")}
    certs = tmp_path / "certs"
    assert find_engine(None, variables | {"DOCKER_HOST": "tcp://far:2376"}, tmp_path).tls == Tls(
        certs / "ca.pem", certs / "cert.pem", certs / "key.pem"
    )
    assert find_engine(None, variables | {"DOCKER_HOST": "unix:///x"}, tmp_path).tls is None


def test_unknown_context_is_an_error_and_no_silent_default(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'gone' does not exist.*docker context ls"):
        find_engine(None, {"DOCKER_CONTEXT": "gone"}, tmp_path)


@pytest.mark.parametrize("address", ["far", "ftp://far", "tcp://", "npipe:////./pipe/docker"])
def test_unusable_address_says_what_to_write(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write unix:///path"):
        find_engine(address, {}, tmp_path)


def test_broken_docker_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker/config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        find_engine(None, {}, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"OSType": "windows"}, "Windows"),
        ({"SecurityOptions": []}, "no seccomp"),
        ({"SecurityOptions": ["name=seccomp", "name=rootless"]}, "maps user ids"),
        ({"SecurityOptions": ["name=seccomp", "name=userns"]}, "maps user ids"),
        ({"MemoryLimit": False}, "no memory cgroup"),
        ({"PidsLimit": False}, "no pids cgroup"),
    ],
)
def test_engine_that_cannot_hold_the_limits_is_refused(
    change: dict[str, object], message: str
) -> None:
    refuse_unusable(INFO)
    with pytest.raises(BackendUnavailable, match=message):
        refuse_unusable({**INFO, **change})


def test_sockets_are_shared_only_by_a_local_engine_with_the_same_kernel() -> None:
    local = Engine("unix:///var/run/docker.sock")
    assert shares_sockets(local, {"DefaultRuntime": "runc"}, "")
    assert not shares_sockets(local, {"DefaultRuntime": "runsc"}, "")
    assert not shares_sockets(local, {"DefaultRuntime": "runc"}, "runsc")
    assert not shares_sockets(local, {"OperatingSystem": "Docker Desktop"}, "runc")
    assert not shares_sockets(Engine("tcp://localhost:2375"), {}, "runc")


def test_gvisor_is_known_by_its_name_its_program_and_as_the_default() -> None:
    runtimes = {
        "runc": {"path": "runc"},
        "safe": {"path": "/opt/gvisor/runsc"},
        "shim": {"runtimeType": "io.containerd.runsc.v1"},
        "nvidia": {"path": "nvidia-container-runtime"},
    }
    info = {"Runtimes": runtimes, "DefaultRuntime": "runc"}
    assert [name for name in ("", *runtimes, "runsc-kvm") if is_gvisor(info, name)] == [
        "safe",
        "shim",
        "runsc-kvm",
    ]
    assert is_gvisor({**info, "DefaultRuntime": "safe"}, "")


@pytest.mark.parametrize(
    ("text", "error", "remedy"),
    [
        ("No such image: x", ImageMissing, "mcp-sandbox images build"),
        ("invalid mount config: bind source path does not exist: /x", BackendUnavailable, "remote"),
        ("Unknown runtime specified runsc", BackendUnavailable, "daemon.json"),
        ("could not find an available address pool", CapacityReached, "default-address-pools"),
        ("anything else", BackendUnavailable, "mcp-sandbox doctor"),
    ],
)
def test_refusal_of_the_engine_comes_with_a_remedy(
    text: str, error: type[OperatorError], remedy: str
) -> None:
    explained = explain_refusal(500, text)
    assert type(explained) is error
    assert text in str(explained)
    assert remedy in str(explained)


@pytest.mark.parametrize(
    "reason",
    [
        "lookup registry-1.docker.io on 10.0.0.1:53: no such host",
        "dial tcp 1.2.3.4:443: i/o timeout",
        "dial tcp 127.0.0.1:443: connect: connection refused",
        "x509: certificate signed by unknown authority",
    ],
)
def test_build_without_a_registry_names_the_way_without(reason: str) -> None:
    explained = str(explain_build(f'Get "https://registry-1.docker.io/v2/": {reason}'))
    assert reason in explained
    assert explained.endswith("mcp-sandbox images build --from-packages")


def test_build_with_a_failed_command_does_not_blame_the_registry() -> None:
    said = "The command 'echo connection refused; false' returned a non-zero code: 1"
    explained = str(explain_build(said))
    assert said in explained
    assert "--from-packages" not in explained


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("PermissionError(13, 'Permission denied')", "docker group"),
        ("FileNotFoundError(2, 'No such file or directory')", "install and start Docker"),
        ("[Errno 111] Connection refused", "systemctl start docker"),
        ("Read timed out. (read timeout=60)", "did not answer in time"),
        ("Install paramiko package to enable ssh:// support", "pip install 'mcp-sandbox[ssh]'"),
        ("something else", "docker info"),
    ],
)
def test_silence_of_the_engine_comes_with_a_remedy(reason: str, remedy: str) -> None:
    assert remedy in str(explain_silence("unix:///x", reason))
