#!/bin/bash
# An answer with full marks.
set -eu
cat > "${SANDBOX_ROOT:-}/app/answer.txt" <<'EOF'
{"name": "Ada", "age": 36, "city": "London"}
EOF
