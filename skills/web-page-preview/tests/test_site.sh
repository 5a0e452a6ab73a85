#!/usr/bin/env bash
# Run in a copy of the skill's folder, where it writes.
set -euo pipefail

mkdir site
cp assets/starter.html site/index.html
python3 scripts/check_site.py site | grep 'no problems' > /dev/null

sed -i 's|</main>|<img src="missing.png" alt="a picture"></main>|' site/index.html
code=0
python3 scripts/check_site.py site > told || code=$?
test "$code" = 1
grep -q 'broken-link: missing.png' told

printf 'GIF89a' > site/missing.png
python3 scripts/bundle_page.py site/index.html one.html
grep -q 'src="data:image/png;base64,' one.html
