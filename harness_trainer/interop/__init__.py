"""Our sandboxes and our capture for trainers of other people: OpenEnv sessions that TRL's harness worker can train on.

Owns the public names only. Importing it imports OpenEnv (seconds); nothing else of ours imports it.
"""

from harness_trainer.interop.sessions import HarnessSession, HarnessSessionFactory, SessionFailed, prompt_rows

__all__ = ["HarnessSession", "HarnessSessionFactory", "SessionFailed", "prompt_rows"]
