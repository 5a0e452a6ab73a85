#!/usr/bin/env bash
# Run by `mcp-sandbox skills test`, in a copy of the skill's folder: the commands work that
# references/limits.md names.
set -euo pipefail

sed -n '/^```sh$/,/^```$/p' references/limits.md | grep -v '^```' > look.sh
bash look.sh > told
grep -q '/workspace' told
grep -q 'PID' told
