#!/bin/bash
# An answer with full marks.
set -eu
cat > "${SANDBOX_ROOT:-}/app/answer.txt" <<'EOF'
A green boat drifts down the river past a stone where a bird sends its song into the wind and light.
EOF
