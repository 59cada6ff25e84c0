"""The one error of this package. Its message is one line that says what is wrong and what to do next."""

from __future__ import annotations


class JobsError(Exception):
    """The service refused, could not be reached, or holds something else than what was expected."""


class CopyTaken(JobsError):
    """Somebody else has written to the copy since this process did: two runs must not share one."""
