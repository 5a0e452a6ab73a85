#!/usr/bin/env bash
# Installs and starts what the tests need, printing each step first. Needs root on Debian or
# Ubuntu; elsewhere it says what is missing. What is there already is left alone.
set -euo pipefail
cd "$(dirname "$0")/.."

# program:package
NEEDED=(dockerd:docker.io docker:docker-cli iptables:iptables bwrap:bubblewrap runsc:runsc
  mmdebstrap:mmdebstrap rg:ripgrep node:nodejs npm:npm ip:iproute2 unshare:util-linux git:git
  curl:curl wget:wget redis-server:redis-server
  systemd-analyze:systemd)
DAEMON_JSON=/etc/docker/daemon.json
DOCKERD_PID=.venv/dockerd.pid
DOCKERD_LOG=.venv/dockerd.log
CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt

say() { printf '== %s\n' "$*"; }

missing_packages() {
  local pair
  for pair in "${NEEDED[@]}"; do
    command -v "${pair%%:*}" >/dev/null || echo "${pair##*:}"
  done
}

install_packages() {
  local package wanted=("$@") known=()
  say "installing with apt-get: ${wanted[*]}"
  apt-get update -qq </dev/null
  for package in "${wanted[@]}"; do
    # Before Debian 13 the docker command is part of docker.io; not every Ubuntu has runsc.
    if apt-cache show "$package" >/dev/null 2>&1; then
      known+=("$package")
    else
      say "this release has no package $package; going on without it"
    fi
  done
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${known[@]}" \
    </dev/null >/dev/null
}

engine_answers() { timeout 10 docker version >/dev/null 2>&1; }

configure_engine() {
  [ ! -e "$DAEMON_JSON" ] && command -v runsc >/dev/null || return 0
  say "writing $DAEMON_JSON: the runtime runsc"
  mkdir -p "$(dirname "$DAEMON_JSON")"
  printf '{"runtimes": {"runsc": {"path": "%s", "runtimeArgs": %s}}}\n' "$(command -v runsc)" \
    '["--platform=ptrace", "--network=host"]' >"$DAEMON_JSON"
}

start_engine() {
  if [ -d /run/systemd/system ]; then
    say "starting docker with systemctl"
    systemctl start docker
  else
    say "starting dockerd in the background (log: $DOCKERD_LOG)"
    setsid dockerd >"$DOCKERD_LOG" 2>&1 </dev/null &
    echo $! >"$DOCKERD_PID"
    say "stop it later with: kill $(cat "$DOCKERD_PID")"
  fi
  local tries
  for tries in $(seq 60); do
    if engine_answers; then return; fi
    sleep 0.5
  done
  say "dockerd does not answer after $((tries / 2)) s:"
  tail -n 5 "$DOCKERD_LOG" >&2 || true
  return 1
}

build_image() {
  local options=(--from-packages)
  [ -r "$CA_BUNDLE" ] && options+=(--ca-bundle "$CA_BUNDLE")
  [ -n "${MCP_SANDBOX_DOCKER__IMAGE:-}" ] && options+=(--tag "$MCP_SANDBOX_DOCKER__IMAGE")
  say "building the base image from Debian packages (a few minutes)"
  .venv/bin/mcp-sandbox images build base "${options[@]}" </dev/null
}

mapfile -t missing < <(missing_packages)
# Before Debian 13 docker.io brings the docker command; asking for docker-cli too does no harm.
if [ "${#missing[@]}" -gt 0 ] || ! engine_answers; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "missing for the whole test suite: ${missing[*]:-a running Docker engine}"
    say "install them (Debian, Ubuntu: sudo apt-get install ${missing[*]:-docker.io}), start"
    say "Docker, and see that you may use it; what needs them is skipped now"
    exit 0
  fi
fi
if [ "${#missing[@]}" -gt 0 ]; then install_packages "${missing[@]}"; fi
if ! engine_answers; then
  configure_engine
  start_engine
fi
if ! .venv/bin/mcp-sandbox images check >/dev/null 2>&1; then build_image; fi
