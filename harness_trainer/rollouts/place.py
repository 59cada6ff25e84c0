"""Where one rollout's agent works: its task, sandbox and session, and what of the harness's data goes in there.

Owns the names of things inside that are the same however the agent is run. Used by `agents` and `harbor_run`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capture_proxy.types import Session
from harness_trainer.harnesses import base as harness_base
from harness_trainer.harnesses.base import Harness
from harness_trainer.rollouts.boxes import Boxes
from harness_trainer.tasks import Task
from sandboxes.base import Sandbox

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Place:
    """Example: Place("g00017-2-5f0c", task, boxes, sandbox, session, Path("runs/a/artifacts/g00017-2-5f0c"))."""

    rollout_id: str
    task: Task
    boxes: Boxes
    sandbox: Sandbox
    session: Session
    artifacts: Path  # folder of what is kept of the rollout; may not exist yet

    @property
    def harness(self) -> Harness:
        return self.boxes.harness

    @property
    def values(self) -> dict[str, str | int]:
        """What `harnesses.base.PLACEHOLDERS` stand for."""
        return self.boxes.values(self.task, self.session, self.sandbox)

    def search_path(self) -> dict[str, str]:
        """PATH with the programs that we have installed; {} = there are none, and the sandbox's own is right."""
        if self.harness.install is None:
            return {}
        programs = str(self.values["bin"])
        # A Python environment's `python` and `pip` are the agent's, not those that its commands should find.
        last = self.harness.install.type == "pip"
        return {"PATH": f"{_PATH}:{programs}" if last else f"{programs}:{_PATH}"}

    def network_env(self) -> dict[str, str]:
        return self.boxes.network_env(self.task, self.session, self.sandbox)

    async def put_files(self) -> None:
        """Write the harness's own files."""
        for path, text in harness_base.render_files(self.harness, self.values).items():
            await self.sandbox.put_text(text, path)
