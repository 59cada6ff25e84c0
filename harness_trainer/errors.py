"""Errors a person sees. Each message is one line that says what is wrong and what to do next.

The command line prints the message and exits with `exit_code`; a traceback that reaches a person is a bug.
"""

from __future__ import annotations


class HarnessTrainerError(Exception):
    """Base of the errors that the command line prints as one line."""

    exit_code = 1


class Terminated(KeyboardInterrupt):
    """SIGTERM: whoever sent it kills in some seconds. To code that ends in order by Ctrl-C it is the same."""


class ConfigError(HarnessTrainerError):
    """A flag, a YAML field or a name is wrong."""

    exit_code = 2


class TaskError(HarnessTrainerError):
    """A task folder cannot be used."""

    exit_code = 2


class SetupError(HarnessTrainerError):
    """Something this machine lacks (npm, the engine environment, disk space, a free port)."""

    exit_code = 3


class EngineFailed(HarnessTrainerError):
    """The engine did not start, died, or cannot be trained from."""

    exit_code = 4


class GatewayFailed(HarnessTrainerError):
    """The capture proxy did not start, died, or refused an admin call."""

    exit_code = 4


class DriverFailed(HarnessTrainerError):
    """What drives an agent from outside its sandbox died, or did not answer."""

    exit_code = 4


class RunDirError(HarnessTrainerError):
    """The run folder cannot be used: another config, another live run, or no space."""

    exit_code = 5


class TrainingFailed(HarnessTrainerError):
    """The run cannot go on: no trainable rollouts, a worker that died, a weight update that failed."""

    exit_code = 6
