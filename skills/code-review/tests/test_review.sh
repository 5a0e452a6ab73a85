#!/usr/bin/env bash
# Run in a copy of the skill's folder, where it writes.
set -euo pipefail

cat > change.patch <<'PATCH'
diff --git a/shop.py b/shop.py
--- a/shop.py
+++ b/shop.py
@@ -1,2 +1,3 @@
 def pay():
-    return charge()
+    os.system(f"charge {card}")
+    return True
PATCH
code=0
python3 scripts/review_diff.py --diff change.patch > told || code=$?
test "$code" = 1
grep -q '^shop.py  +2 -1$' told
grep -q '^shop.py:2: runs-text: ' told
