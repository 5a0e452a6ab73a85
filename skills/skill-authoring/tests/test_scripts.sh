#!/usr/bin/env bash
# Run in a copy of the skill's folder, where it writes.
set -euo pipefail

python3 scripts/new_skill.py notes --description 'Write notes: short ones. Use when asked for notes.'
python3 scripts/validate_skill.py notes | grep -x 'notes: valid' > /dev/null

sed -i 's/^name: notes$/name: Notes/' notes/SKILL.md
code=0
python3 scripts/validate_skill.py notes > told || code=$?
test "$code" = 1
grep -q 'notes/SKILL.md:2: error: the name must be in lower case' told
