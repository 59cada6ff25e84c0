"""Starts the worker: makes a package of this folder alone, so that its modules find each other and hide no agent's."""

from __future__ import annotations

import importlib
import sys
import types

_NAME = "harness_trainer_harbor_worker"

if __name__ == "__main__":
    package = types.ModuleType(_NAME)
    package.__path__ = [sys.path.pop(0)]  # Python has put the folder there, where it would hide others' modules
    sys.modules[_NAME] = package
    importlib.import_module(f"{_NAME}.worker").main(sys.argv[1:])
