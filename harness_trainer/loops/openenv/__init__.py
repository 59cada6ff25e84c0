"""OpenEnv environments whose tools the model calls without a class around them (`--env openenv:...`).

    openenv:https://HOST            a server, a Space say
    openenv:docker:IMAGE            a container of ours, one for all episodes or one per episode
    openenv:local:MODULE:APP        a process of ours that serves the app (or FILE.py:APP)
    openenv:python:MODULE:CLASS     a typed client, of the server at --env.url

`environment` is the source of episodes, one fresh session each; `session` what a server's answers mean; `tools` what
the model is shown; `servers`, `containers` and `serve` those that are started here. A person's own environment class,
which makes its clients itself, needs nothing of this: see `loops.environment_class`.
"""
