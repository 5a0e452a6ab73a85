#!/bin/sh
# Installs the packages of a sandbox, then takes out what a sandbox must not or need not have.
# Usage: install.sh DIRECTORY PACKAGE...   (DIRECTORY holds this script and maybe ca-bundle.crt)
set -eu

here=$1
shift
export DEBIAN_FRONTEND=noninteractive

# A base made from packages has everything already: then no network is needed.
if ! dpkg -s "$@" >/dev/null 2>&1; then
    options=
    if [ -s "$here/ca-bundle.crt" ]; then
        options="-o Acquire::https::CAInfo=$here/ca-bundle.crt"
    fi
    # shellcheck disable=SC2086
    apt-get $options update
    # shellcheck disable=SC2086
    apt-get $options install -y --no-install-recommends "$@"
fi

# pip may write to the home directory of the sandbox, the only place it can write to.
rm -f /usr/lib/python3*/EXTERNALLY-MANAGED

# ping works without privileges; with its file capability it could not even start.
cp /usr/bin/ping /usr/bin/ping.new && mv /usr/bin/ping.new /usr/bin/ping

# Nothing in a sandbox gains privileges.
find / -xdev -type f -perm /6000 -exec chmod a-s {} +

# 108 MB for what few programs ask their compiler for: -flto and -fsanitize.
rm -f /usr/libexec/gcc/*/*/lto1 /usr/bin/*lto-dump* \
    /usr/lib/gcc/*/*/lib*san.* /usr/lib/gcc/*/*/lib*san_preinit.o /usr/lib/*-linux-gnu*/lib*san.*

find /usr/share/doc -type f ! -name copyright -delete
find /usr/share/doc -type l -delete
find /usr/share/doc -type d -empty -delete
rm -rf /usr/share/man/* /usr/share/info/* /usr/share/locale/* \
    /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb \
    /var/cache/debconf/*-old /var/log/*.log /var/log/apt \
    /etc/apt/apt.conf.d/99mmdebstrap /etc/machine-id /var/lib/dbus/machine-id

if [ ! -e /etc/apt/sources.list.d/debian.sources ]; then
    cat >/etc/apt/sources.list <<'END'
deb http://deb.debian.org/debian trixie main
deb http://deb.debian.org/debian trixie-updates main
deb http://deb.debian.org/debian-security trixie-security main
END
fi

groupadd --gid 10001 sandbox
useradd --uid 10001 --gid 10001 --no-create-home --home-dir /home/sandbox --shell /bin/bash sandbox
rm -f /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow-
mkdir -p /workspace /home/sandbox /run/mcp-sandbox /opt/mcp-sandbox
chown 10001:10001 /workspace /home/sandbox
