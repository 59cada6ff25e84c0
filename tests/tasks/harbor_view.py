"""What Harbor itself reads in task folders. Run with Harbor's own Python (3.12): harbor_view.py FOLDER...

Prints a JSON list, a dictionary per folder; {"error": "..."} where Harbor refuses the task.
"""

import json
import sys
import warnings

from harbor.models.task.artifacts import normalize_artifact_entries
from harbor.models.task.config import VerifierEnvironmentMode
from harbor.models.task.task import Task
from harbor.models.task.verifier_mode import resolve_task_verifier_mode


def policy(phase, environment):
    """Mode and hosts as the file sets them; None when it sets neither."""
    explicit = phase.explicit_phase_policy()
    if explicit is None and "network_mode" in environment.model_fields_set:
        explicit = environment.resolve_baseline()
    return None if explicit is None else [explicit.network_mode.value, explicit.allowed_hosts]


def view(folder):
    task = Task(folder)
    config, box = task.config, task.config.environment
    check = box.healthcheck
    return {
        "name": task.name,
        "instruction": task.instruction.strip(),
        "agent_timeout_s": config.agent.timeout_sec,
        "agent_user": None if config.agent.user is None else str(config.agent.user),
        "agent_network": policy(config.agent, box),
        "verifier_timeout_s": config.verifier.timeout_sec,
        "verifier_user": None if config.verifier.user is None else str(config.verifier.user),
        "verifier_network": policy(config.verifier, box),
        "verifier_env": config.verifier.env,
        "verifier_fresh": resolve_task_verifier_mode(config) == VerifierEnvironmentMode.SEPARATE,
        "build_timeout_s": box.build_timeout_sec,
        "image": box.docker_image,
        "cpus": box.cpus,
        "memory_mb": box.memory_mb,
        "disk_mb": box.storage_mb,
        "env": box.env,
        "workdir": box.workdir,
        "healthcheck": check
        and [
            check.command,
            check.interval_sec,
            check.timeout_sec,
            check.start_period_sec,
            check.start_interval_sec,
            check.retries,
        ],
        "artifacts": [[a.source, a.destination, a.exclude] for a in normalize_artifact_entries(config.artifacts)],
        "solution_env": config.solution.env,
        "solution": task.paths.discovered_solve_path_for(box.os) is not None,
        "metadata": config.metadata,
    }


def main(folders):
    warnings.simplefilter("ignore")
    views = []
    for folder in folders:
        try:
            views.append(view(folder))
        except Exception as error:
            views.append({"error": f"{type(error).__name__}: {error}"})
    json.dump(views, sys.stdout)


main(sys.argv[1:])
