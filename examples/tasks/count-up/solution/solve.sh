#!/bin/bash
# An answer with full marks.
set -eu
cat > "${SANDBOX_ROOT:-}/app/answer.txt" <<'EOF'
1 2 3 4 5 6 7 8 9 10
EOF
