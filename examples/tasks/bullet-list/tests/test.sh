#!/bin/bash
# Harbor runs this when the agent is done and reads /logs/verifier/reward.txt. -I: nothing the agent planted is imported.
set -u
exec python3 -I "${SANDBOX_ROOT:-}/tests/score.py"
