#!/bin/bash
# An answer with full marks.
set -eu
cat > "${SANDBOX_ROOT:-}/app/answer.txt" <<'EOF'
the moon hangs low and pale above the quiet hills.
EOF
