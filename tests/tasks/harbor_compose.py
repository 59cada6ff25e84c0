"""Harbor's own Docker environment for machines whose `docker` has no `compose` plugin. Imported by Harbor (3.12).

Debian's docker-compose 1.29 does the same work under another name; it cannot wait for containers or copy files, which
Harbor knows how to do without, and it asks for a terminal unless told not to.
"""

import functools

from harbor.environments.docker.docker import DockerEnvironment
from harbor.environments.docker.runtime import ContainerRuntime


class ComposeV1Environment(DockerEnvironment):
    @classmethod
    @functools.cache
    def runtime(cls):
        return ContainerRuntime(
            engine=("docker",), compose=("docker-compose",), supports_compose_wait=False, supports_compose_cp=False
        )

    @classmethod
    def preflight(cls, kwargs=None):
        cls.parse_options(kwargs)  # Harbor's own check would ask for the plugin

    async def _run_docker_compose_command(self, command, *args, **kwargs):
        if command[0] == "exec" and "-T" not in command:
            command = ["exec", "-T", *command[1:]]
        return await super()._run_docker_compose_command(command, *args, **kwargs)
