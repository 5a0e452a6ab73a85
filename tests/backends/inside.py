"""Runs inside a sandbox and prints, as JSON, every way in which it is less closed than promised."""

import glob
import json
import os
import resource
import socket
import stat
import sys

problems: list[str] = []


def read(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()


def expect(held: bool, problem: str) -> None:
    if not held:
        problems.append(problem)


def refused(path: str, flags: int = os.O_RDONLY) -> bool:
    try:
        fd = os.open(path, flags)
        data = os.read(fd, 1) if flags == os.O_RDONLY else b"x"
    except OSError:
        return True
    return not data


status = dict(
    line.split(":\t", 1) for line in read("/proc/self/status").splitlines() if ":\t" in line
)
expect(os.getuid() != 0 and os.getgid() != 0, "runs as root")
expect(os.getgroups() in ([], [os.getgid()]), f"extra groups {os.getgroups()}")
expect(status["NoNewPrivs"] == "1", "may gain privileges")
expect(status["Seccomp"] == "2", "no seccomp filter")
for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
    expect(int(status[name], 16) == 0, f"{name} is {status[name]}")

for folder in ("/", "/etc", "/usr/bin", "/opt/mcp-sandbox", "/var", "/run", "/sys", "/dev"):
    expect(refused(f"{folder}/planted", os.O_WRONLY | os.O_CREAT), f"{folder} can be written")
for folder in ("/workspace", "/home/sandbox", "/tmp", "/dev/shm"):
    expect(os.access(folder, os.W_OK), f"{folder} cannot be written")

for name in ("mem", "environ", "maps", "stack", "auxv"):
    expect(refused(f"/proc/1/{name}"), f"/proc/1/{name} of the runner can be read")
expect(not os.access("/proc/1/fd", os.R_OK | os.X_OK), "descriptors of the runner can be listed")
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        environment = read(path)
    except OSError:
        continue
    expect("MCP_SANDBOX_TOKEN" not in environment, f"{path} shows the token")
expect("MCP_SANDBOX_TOKEN" not in os.environ, "the token is in the environment")

for path in ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sysrq-trigger"):
    expect(refused(path), f"{path} can be read")
for path in ("/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern"):
    expect(refused(path, os.O_WRONLY), f"{path} can be written")
expect(not os.listdir("/sys/firmware"), "/sys/firmware is open")
expect(not os.path.exists("/var/run/docker.sock"), "the engine's socket is here")
for line in read("/proc/self/cgroup").splitlines():
    expect(line.rstrip().endswith(":/"), f"sees the host's cgroup: {line.strip()}")
for root, _, names in os.walk("/sys/fs/cgroup"):
    expect(not os.access(root, os.W_OK), f"{root} can be written")
    for name in names:
        expect(refused(os.path.join(root, name), os.O_WRONLY), f"{root}/{name} can be written")

devices = {
    entry.name
    for entry in os.scandir("/dev")
    if stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode) in (stat.S_IFCHR, stat.S_IFBLK)
}
usual = {"null", "zero", "full", "random", "urandom", "tty", "console", "ptmx"}
expect(devices <= usual, f"more devices than usual: {sorted(devices - usual)}")

expect(socket.gethostname() == "sandbox", "wrong host name")
interfaces = [name for _, name in socket.if_nameindex()]
expect("eth0" not in interfaces, f"network interfaces {interfaces}")
expect(len(read("/proc/net/route").splitlines()) <= 1, "there is a route out")
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname(), timeout=5).close()

expect(resource.getrlimit(resource.RLIMIT_CORE) == (0, 0), "core files")
expect(resource.getrlimit(resource.RLIMIT_NOFILE)[1] == 4096, "too many open files")

for root, _, names in os.walk("/usr"):
    for name in names:
        mode = os.lstat(os.path.join(root, name)).st_mode
        expect(not (stat.S_ISREG(mode) and mode & 0o6000), f"{root}/{name} is setuid")
for root, _, names in os.walk("/opt/mcp-sandbox"):
    for name in names:
        expect(os.stat(os.path.join(root, name)).st_uid == 0, f"{name} is not root's")

sys.stdout.write(json.dumps(problems))
