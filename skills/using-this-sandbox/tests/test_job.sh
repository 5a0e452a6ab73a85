#!/usr/bin/env bash
# Run by `mcp-sandbox skills test`, in a copy of the skill's folder.
set -euo pipefail
export JOBS_DIR=$PWD/jobs

python3 scripts/job.py start good -- echo well
python3 scripts/job.py wait good | grep -x '\[good: done\]' > /dev/null

python3 scripts/job.py start bad -- bash -c 'echo begun; exit 7'
code=0
python3 scripts/job.py wait bad > told || code=$?
test "$code" = 1
grep -qx 'begun' told
grep -qx '\[bad: failed (exit code 7)\]' told
