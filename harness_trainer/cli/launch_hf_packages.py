"""What `launch hf-jobs --package` installs, beside what the run needs: found out in seconds, and not in a paid job.

Owns what a package brings and what the image that packages go into has. Agents are installed in the job, by its npm or
its Python, and only then taken into sandboxes, E2B's too. Called by `launch_hf_order`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from harness_trainer.config import RunConfig
from harness_trainer.errors import ConfigError
from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.base import NpmInstall, PipInstall
from harness_trainer.rollouts.mix import shares_of

PYTHON = "3.12"  # of `jobs.hf.UV_IMAGE`, which has neither another one nor Node.js
_OURS = re.compile(r"harness[-_.]trainer", re.IGNORECASE)
_NAMED = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?")
_EXAMPLE = re.compile(r"[\w-]+")  # `examples`, or one of them: a folder or a dataset has a slash


def require_usable(packages: Sequence[str], image: str | None, config: RunConfig, *, e2b: bool) -> None:
    """Raises ConfigError for a run that cannot start from these. `image`: that a person chose for it, if any."""
    if e2b and any(map(_OURS.search, packages)) and not any(map(_brings_e2b, packages)):
        raise ConfigError(
            f"--package {next(filter(_OURS.search, packages))} comes without E2B's SDK, which --sandbox e2b needs: "
            "give 'harness-trainer[e2b]==VERSION', or 'harness-trainer[e2b] @ git+https://...'"
        )
    for source in config.each_source:
        if source.env.type != "own":
            continue
        evaluation = source.evaluation if isinstance(source.evaluation, str) else ""
        for word in _words(f"{source.tasks or ''},{evaluation}"):
            if _EXAMPLE.fullmatch(word):
                raise ConfigError(
                    f"--tasks {word}: the example tasks are in the repository, and no package has them: push tasks to "
                    "the Hub (hf:OWNER/NAME), put them on a --volume, or give an --image that has them in "
                    "place of --package"
                )
        if image is None:
            _require_installable(source.harness or str(RunConfig.model_fields["harness"].default))


def _require_installable(spec: str) -> None:
    for name, _ in shares_of(spec):
        if "/" in name:  # a file of the job's
            continue
        install = load_harness(name).install
        lacks = "Node.js and npm" if isinstance(install, NpmInstall) else ""
        if isinstance(install, PipInstall) and install.python != PYTHON:
            lacks = f"Python {install.python}"
        if lacks:
            raise ConfigError(
                f"--harness {name} needs {lacks}, which the image that --package goes into has not (it has Python "
                f"{PYTHON}): give --image one with harness-trainer, its engine and Node.js 20 or newer "
                "(docs/launch-hf-jobs.md has a recipe) in place of --package, or choose another agent: pyagent, "
                f"or one from PyPI for Python {PYTHON} (gptme, mistral-vibe, openhands)"
            )


def _brings_e2b(package: str) -> bool:
    named = _NAMED.match(package)
    if named is None:
        return False
    extras = {extra.strip().lower() for extra in (named[2] or "").split(",")}
    return named[1].lower() == "e2b" or (bool(_OURS.fullmatch(named[1])) and bool(extras & {"e2b", "all"}))


def _words(spec: str) -> Iterator[str]:
    return (word.strip() for word in spec.split(",") if word.strip())
