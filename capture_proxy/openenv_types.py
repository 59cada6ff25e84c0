"""OpenEnv's types of a trace, imported when the first trace is asked for.

Owns that import. It runs all of OpenEnv's package, which brings its web pages where gradio is installed (a library of
the trainer's needs it): 120 MB and three seconds in every runner and gateway, for nothing that a trace needs. OpenEnv
does without where gradio is missing, so while it is imported here gradio counts as missing. Called by `trace`.
"""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import cast

_WEB = "gradio"
_importing = threading.Lock()  # traces are made in threads


def training() -> ModuleType:
    """The module with `TrainingTrace` and `TrainingTurn`. Takes two seconds the first time."""
    with _importing:
        hide = _WEB not in sys.modules and "openenv.core" not in sys.modules
        if hide:
            sys.modules[_WEB] = cast(ModuleType, None)  # Python's own way to say that there is none
        try:
            from openenv.core.harness import training

            return cast(ModuleType, training)
        finally:
            if hide:
                del sys.modules[_WEB]
