#!/usr/bin/env bash
# Run in a copy of the skill's folder, where it writes.
set -euo pipefail

printf 'id,amount\n1,10.5\n2,\n3,99\n' > sales.csv
python3 scripts/profile_table.py sales.csv | grep 'amount .*number .*54.75' > /dev/null

python3 scripts/load_sqlite.py data.db sales.csv
test "$(sqlite3 data.db 'SELECT sum(amount) FROM sales')" = 109.5

code=0
python3 scripts/load_sqlite.py data.db sales.csv 2> told || code=$?
test "$code" = 1
grep -q -e '--replace' told
