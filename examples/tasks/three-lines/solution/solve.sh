#!/bin/bash
# An answer with full marks.
set -eu
cat > "${SANDBOX_ROOT:-}/app/answer.txt" <<'EOF'
Soft rain on the roof
Drops run down the glass
The garden drinks and sings
EOF
