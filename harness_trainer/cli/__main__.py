"""`python -m harness_trainer.cli`, the same as the `harness-trainer` command."""

import sys

from harness_trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
