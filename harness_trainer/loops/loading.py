"""A person's class or function by name: `file.py:Name` or `package.module:Name`.

Owns the import and what is said when it fails. A file's own folder is searched too, as when it is run as a script. Used
for environment classes, own loops and reward functions, in the supervisor (to check) and in the runner.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from harness_trainer.loops.base import EnvironmentFault

_FORMS = "give file.py:Name or package.module:Name"


def pin_target(target: str) -> str:
    """The target with a file's path made absolute: the runner works in another folder."""
    where, colon, name = target.rpartition(":")
    return f"{Path(where).expanduser().resolve()}:{name}" if colon and where.endswith(".py") else target


def load_target(target: str) -> Any:
    """What `target` names. Raises EnvironmentFault when it cannot be imported or is not there."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise EnvironmentFault(f"{target!r} names nothing that can be imported: {_FORMS}")
    module = _from_file(Path(where).expanduser(), target) if where.endswith(".py") else _imported(where, target)
    found = getattr(module, name, None)
    if found is None:
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise EnvironmentFault(f"{target}: there is no {name!r} in it; it has {', '.join(own[:8]) or 'nothing'}")
    return found


def _imported(module: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever a person's module raises while it is imported
        missing = isinstance(error, ModuleNotFoundError)
        advice = "; install it, add its folder to PYTHONPATH, or give file.py:Name" if missing else ""
        raise _unloadable(target, error, advice) from error


def _from_file(path: Path, target: str) -> ModuleType:
    if not path.is_file():
        raise EnvironmentFault(f"{target}: there is no file {path}; {_FORMS}")
    path = path.resolve()
    name = f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if (known := sys.modules.get(name)) is not None:  # a class and its reward functions share their module's state
        return known
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(found)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module  # dataclasses and pickles of the file look themselves up there
    try:
        found.loader.exec_module(module)
    except Exception as error:  # whatever a person's file raises
        del sys.modules[name]
        raise _unloadable(target, error, "") from error
    return module


def _unloadable(target: str, error: Exception, advice: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"{target} could not be loaded: {type(error).__name__}: {' '.join(str(error).split())[:200]}{advice}"
    )
