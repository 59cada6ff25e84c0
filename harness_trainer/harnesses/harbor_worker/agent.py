"""The agent that an order names: Harbor's class, its connection to the gateway, and why it cannot be had.

Called by `worker` for `check`, and by `rollout`.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harbor.agents.agent_auth_resolution import PROVIDERS
from harbor.agents.base import BaseAgent
from harbor.agents.factory import AgentFactory
from harbor.agents.installed.base import BaseInstalledAgent
from harbor.models.model_api_format import ModelApiFormat
from harbor.models.trial.config import AgentConfig

# What `harbor_agent.order_for` says of the agent, and of the rollout: folder, network, base_url of either side, token,
# and the environment of every command.
Order = dict[str, Any]


def agent_class(order: Order) -> type[BaseAgent]:
    """Raises ValueError, with the names that Harbor knows."""
    name = order["agent"]
    if ":" not in name and name not in AgentFactory.registered_names():
        known = ", ".join(AgentFactory.registered_names())
        raise ValueError(f"Harbor has no agent {name!r}: it knows {known}; or give a class of yours as module:Class")
    found: type[BaseAgent] = AgentFactory.get_agent_class_from_config(AgentConfig(name=name))
    if not issubclass(found, BaseAgent):
        raise ValueError(f"{name} is no agent: it must be a subclass of harbor.agents.base.BaseAgent")
    spec = found.MODEL_CONNECTION
    if ":" not in name and (spec is None or not found.capabilities.base_url):
        raise ValueError(f"Harbor cannot give the agent {name!r} another model endpoint, so it cannot be captured")
    return found


def calls_from_here(found: type[BaseAgent], order: Order) -> bool:
    if order["calls_from"] is not None:
        return bool(order["calls_from"] == "host")
    return not issubclass(found, BaseInstalledAgent)


def agent_config(found: type[BaseAgent], order: Order) -> AgentConfig:
    """The model connection is the gateway; the session's token is the only key."""
    spec = found.MODEL_CONNECTION
    provider = order["provider"] or (spec and spec.default_provider) or "openai"
    access = PROVIDERS.get(provider)
    keys = list(access.api_key_candidate_names if access else [])
    keys += spec.agent_provider_access.api_key_candidate_names if spec else []
    url = order["urls"]["host" if calls_from_here(found, order) else "sandbox"]
    if url is None:
        raise ValueError("this machine has no address of the gateway, and the agent calls its model from here")
    url += _base_path(found, provider, order["api_format"])
    env = {keys[0] if keys else "OPENAI_API_KEY": order["token"]}
    if spec is None:  # a class that takes no connection reads the provider's usual variables
        env |= dict.fromkeys(access.base_url_candidate_names if access else ["OPENAI_BASE_URL"], url)
    options = dict(order["options"])
    if issubclass(found, BaseInstalledAgent) and order["skip_install"]:
        options["skip_install"] = True
    return AgentConfig(
        name=order["agent"],
        model_name=f"{provider}/{order['model']}",
        base_url=None if spec is None else url,
        model_api_format=None if order["api_format"] is None else ModelApiFormat(order["api_format"]),
        env={**env, **order["env"]},
        kwargs=options,
    )


def _base_path(found: type[BaseAgent], provider: str, api_format: str | None) -> str:
    """What the provider's own base URL has after the host: some clients add `/v1` themselves, some want it there."""
    spec = found.MODEL_CONNECTION
    access = PROVIDERS.get(provider)
    url = access.base_url if access is not None else None
    if spec is not None:
        natives = spec.default_api_format_by_provider
        spoken = api_format or natives.get(provider, natives.get("default"))
        url = spec.default_base_url(provider, ModelApiFormat(spoken) if spoken else None) or url
    return "/v1" if url is None else urlsplit(url).path.rstrip("/")


def make_agent(found: type[BaseAgent], order: Order, logs: Path) -> BaseAgent:
    """Raises what Harbor's classes raise for options and connections that they do not take."""
    agent: BaseAgent = AgentFactory.create_agent_from_config(
        agent_config(found, order), logs_dir=logs, logger=logging.getLogger("agent")
    )
    agent.session_id = f"{order['rollout']}__agent"
    return agent


def check(order: Order) -> str:
    """Why the agent cannot be had, in one line; "" = it can, as far as can be told without a sandbox."""
    nowhere = {"rollout": "check", "token": "t", "urls": dict.fromkeys(("host", "sandbox"), "http://127.0.0.1:9")}
    try:
        found = agent_class(order)
        if order["skip_install"] and not issubclass(found, BaseInstalledAgent):
            return "skip_install is for agents that Harbor installs, and it installs nothing for this one; leave it out"
        with tempfile.TemporaryDirectory() as logs:
            agent = make_agent(found, {**order, **nowhere}, Path(logs))
            if found.MODEL_CONNECTION is not None and agent.model_connection.api_key != nowhere["token"]:
                return "Harbor does not give this agent the key that it is told; name its provider in `provider`"
    except (Exception, SystemExit) as error:  # whatever somebody's module or class raises
        said = " ".join(str(error).split()) or type(error).__name__
        lost = said.startswith("Failed to import module")
        return f"{said}; PYTHONPATH must name its folder by a full path" if lost else said
    return ""
