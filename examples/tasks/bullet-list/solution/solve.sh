#!/bin/bash
# An answer with full marks.
set -eu
cat > "${SANDBOX_ROOT:-}/app/answer.txt" <<'EOF'
- apple
- pear
- plum
- cherry
- fig
EOF
