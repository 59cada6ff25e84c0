"""How a node's sandboxes reach the run's gateway: as on the runner's host where the node is on it, else from outside.

Owns that choice and the words for a person; `worker` tries the address, `members` has it judged.
"""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from harness_trainer.errors import SetupError
from harness_trainer.rollouts.on_ray.messages import NodeFacts
from sandboxes.base import Access, Endpoint

_ON_THE_NODE = ("local", "docker")  # sandboxes whose way to the gateway leads through the node


def same_machine(one: NodeFacts, other: NodeFacts) -> bool:
    """Whether they share loopback and sockets in the file system."""
    return (one.boot_id, one.network) == (other.boot_id, other.network)


def access_on(node: NodeFacts, name: str, here: NodeFacts, access: Access, sandbox: str, own_address: str) -> Access:
    """What sandboxes on the node are led to. Raises SetupError with what to set.

    `sandbox` is their type; `own_address`, the runner's host by Ray's account, is for the advice.
    """
    gateway = access.gateway
    if gateway is None or same_machine(node, here):
        return access
    public = gateway.public_now()
    if public is None:
        raise SetupError(
            f"Ray node {name} is another host than the gateway's, which listens on loopback ({gateway.url}): open "
            "it with --gateway.expose direct --gateway.expose.listen 0.0.0.0:8000 --gateway.public-url "
            f"http://{own_address}:8000 (the agents' side only; a session's token is what it lets in)"
        )
    host = urlsplit(public).hostname or ""
    if host == "localhost" or host == "::1" or host.startswith("127."):
        raise SetupError(
            f"Ray node {name} is another host than the gateway's, and --gateway.public-url {public} is loopback there: "
            "give the address of this host as nodes reach it, e.g. "
            f"http://{own_address}:{urlsplit(public).port or 8000}"
        )
    if sandbox in _ON_THE_NODE and urlsplit(public).scheme != "http":
        raise SetupError(
            f"{sandbox} sandboxes on Ray node {name} need the gateway at an http://HOST:PORT address, and "
            f"--gateway.public-url is {public}: open it in the cluster's own network with --gateway.expose direct"
        )
    url = public if sandbox in _ON_THE_NODE else gateway.url
    return replace(access, gateway=Endpoint(url=url, public_url=public))


def judge(name: str, url: str, seen: tuple[int, bytes] | str, own: tuple[int, bytes] | str) -> str | None:
    """What is wrong with the gateway's address as the node saw it; None = it leads to this run's gateway."""
    if isinstance(own, str) or seen == own:  # the gateway itself is away: nothing can be said of the way
        return None
    said = seen if isinstance(seen, str) else f"it answered {seen[0]}, in other words than this run's gateway"
    return (
        f"Ray node {name} does not reach the gateway at {url}: {said}; check the address, the port and firewalls "
        "between the nodes (--gateway.public-url, --gateway.expose)"
    )
