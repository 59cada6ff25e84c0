"""A job on SLURM as `launch inside-slurm` is one, with `playing_train` for the training.

$PLAY is what that plays, as JSON: its config in place of the run's. $PLAY_CHECK: what the machine's checks exit with.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from harness_trainer.cli import launch_slurm_inside
from tests.jobs import playing_train

INSIDE = (sys.executable, "-m", "tests.jobs.slurm_inside", "job")
_TRAIN = (sys.executable, "-m", "tests.jobs.slurm_inside", "train")
_CHECK = ("sh", "-c", "exit ${PLAY_CHECK:-0}")

if __name__ == "__main__":
    what = sys.argv.pop(1)
    if what == "job":
        sys.exit(launch_slurm_inside.run(sys.argv[1:], train=_TRAIN, check=_CHECK))
    Path(sys.argv[sys.argv.index("--config") + 1]).write_text(os.environ["PLAY"])
    sys.exit(playing_train.main())
