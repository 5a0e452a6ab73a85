#!/bin/sh
# Puts Node.js with npm into a directory that becomes /usr/local. npm's package `node` carries the
# program; where there is no npm to ask for it, Debian's is installed first.
# Usage: node.sh DIRECTORY   (maybe with ca-bundle.crt beside this script)
set -eu
umask 022

target=$1
bundle=$(dirname "$0")/ca-bundle.crt
options=
if [ -s "$bundle" ]; then
    options="-o Acquire::https::CAInfo=$bundle"
    export NODE_EXTRA_CA_CERTS="$bundle"
fi
if ! command -v npm >/dev/null; then
    # shellcheck disable=SC2086
    apt-get $options update
    # shellcheck disable=SC2086
    apt-get $options install -y --no-install-recommends npm
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# What it says goes where apt and mmdebstrap report, too.
npm install --global --prefix "$work" --cache "$work/cache" --no-audit --no-fund --no-update-notifier \
    node@22 npm@10 >&2

mkdir -p "$target/bin" "$target/lib/node_modules"
cp "$work/lib/node_modules/node/bin/node" "$target/bin/node"
cp -R "$work/lib/node_modules/npm" "$target/lib/node_modules/npm"
rm -rf "$target/lib/node_modules/npm/docs" "$target/lib/node_modules/npm/man"
ln -s ../lib/node_modules/npm/bin/npm-cli.js "$target/bin/npm"
ln -s ../lib/node_modules/npm/bin/npx-cli.js "$target/bin/npx"
