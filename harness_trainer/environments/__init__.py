"""Where rollouts come from, if not from our own agents in our own sandboxes: servers that run both, and environments
whose turns are ours; and the settings of a run's several sources.

Owns those settings (`union`, `source_config`). The client of a server that runs agents is a module of its own here;
environments whose turns are ours are `loops`'s. `rollouts` takes rollouts from both.
"""

from __future__ import annotations

from harness_trainer.environments.class_config import EnvironmentClassConfig
from harness_trainer.environments.config import OpenEnvHarborConfig, OwnLoopConfig
from harness_trainer.environments.openenv_config import OpenEnvConfig
from harness_trainer.environments.ors_config import OrsConfig
from harness_trainer.environments.source_config import SourceConfig, read_sources
from harness_trainer.environments.union import WHITE_BOX, EnvConfig, OwnConfig, as_env, env_of_tasks

__all__ = [
    "WHITE_BOX",
    "EnvConfig",
    "EnvironmentClassConfig",
    "OpenEnvConfig",
    "OpenEnvHarborConfig",
    "OrsConfig",
    "OwnConfig",
    "OwnLoopConfig",
    "SourceConfig",
    "as_env",
    "env_of_tasks",
    "read_sources",
]
