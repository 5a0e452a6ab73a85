#!/usr/bin/env bash
# Run in a copy of the skill's folder, where it writes: the commands work that
# references/limits.md names.
set -euo pipefail

sed -n '/^```sh$/,/^```$/p' references/limits.md | grep -v '^```' > look.sh
bash look.sh > told
grep -q '/workspace' told
grep -q 'PID' told
