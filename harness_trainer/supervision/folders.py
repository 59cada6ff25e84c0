"""Folders of a run outside its own: the gateway's socket for sealed containers, and weights on their way to the engine.

Owns where they are, who may enter, and that they are on record, so that whoever cleans up after a dead run finds them.
Called by `run`; each is gone when the stack is left.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

from harness_trainer.rundir import RunDir
from sandboxes.docker_volumes import open_to_relays, sockets_root
from sandboxes.lifecycle import claim


def agents_socket(stack: ExitStack, registry: Path, run: RunDir) -> Path:
    """Where the gateway listens for sealed containers: their relay gets this socket's folder and nothing else.

    The folder above keeps this machine's other users out; it is short, as a socket's path must be.
    """
    owned = claim(registry, "sockets", run_id=run.path.name)
    stack.callback(owned.release)
    folder = owned.make_folder(sockets_root()) / "agents"
    stack.callback(shutil.rmtree, folder.parent, ignore_errors=True)
    folder.mkdir()
    folder.chmod(0o711)
    open_to_relays(folder.parent)
    return folder / "gateway.sock"


def transfer_dir(stack: ExitStack, registry: Path, run: RunDir) -> Path:
    """A folder for weights on their way to the engine, in memory where there is a /dev/shm."""
    shm = Path("/dev/shm")
    owned = claim(registry, "weights", run_id=run.path.name)
    stack.callback(owned.release)
    folder = owned.make_folder(shm if os.access(shm, os.W_OK) else run.internal)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder
