"""What the body of a call may hold: read, checked against a list of what is allowed, and written anew.

The engine reads JSON keys in any case and takes the last of two, so a look for bad words in the text proves nothing.
Here a key that is not on the list must be empty, and is not passed on; what reaches the engine is only what was
understood.

Owns the lists for containers, commands, networks and volumes. Pure; `door` asks whether networks are ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from sandboxes.socket_proxy.routes import CLAIM, Kind, Refused

Owned = list[tuple[Kind, str]]  # what must be ours

# Of the container itself. Nothing here reaches out of it.
_CONTAINER = frozenset(
    [
        "Hostname",
        "Domainname",
        "User",
        "Tty",
        "OpenStdin",
        "StdinOnce",
        "AttachStdin",
        "AttachStdout",
        "AttachStderr",
        "Env",
        "Cmd",
        "Image",
        "Entrypoint",
        "WorkingDir",
        "Labels",
        "StopSignal",
        "Healthcheck",
        "StopTimeout",
        "NetworkDisabled",
    ]
)
_HOST = frozenset(
    [
        "Memory",
        "MemorySwap",
        "MemoryReservation",
        "NanoCpus",
        "CpuShares",
        "CpuPeriod",
        "CpuQuota",
        "CpusetCpus",
        "PidsLimit",
        "Ulimits",
        "ReadonlyRootfs",
        "Init",
        "ShmSize",
        "StorageOpt",
        "AutoRemove",
        "Dns",
        "DnsSearch",
        "DnsOptions",
        "CapDrop",
    ]
)
# All that a sandbox's root is given, and what a relay on a bridge needs to close that.
_CAPABILITIES = frozenset(
    [
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "NET_ADMIN",
        "NET_BIND_SERVICE",
        "SETGID",
        "SETUID",
        "SYS_PTRACE",
    ]
)
_SECURITY = frozenset({"no-new-privileges", "no-new-privileges:true", "label=disable", "label:disable"})
_SYSCTLS = frozenset({"net.ipv6.conf.all.disable_ipv6", "net.ipv6.conf.default.disable_ipv6"})
_LOGS = frozenset({"", "json-file", "local", "none"})
_SIDECAR = re.compile(r"[a-z0-9_]+-\d+-\d+-[0-9a-f]{8}-net")
_NETWORK_OPTIONS = frozenset({"com.docker.network.bridge.enable_icc"})
_EXEC = frozenset(
    ["Container", "User", "Tty", "AttachStdin", "AttachStdout", "AttachStderr", "Cmd", "Env", "WorkingDir"]
)
_EXEC_START = frozenset({"Tty", "Detach"})


def container(body: Mapping[str, Any], volumes: Collection[str]) -> tuple[dict[str, Any], Owned]:
    """The body of `POST /containers/create` as it is passed on, and what in it must be ours.

    `volumes`: names of volumes that may be mounted, read-only. Raises Refused.
    """
    made = _only(body, _CONTAINER | {"HostConfig"}, "a container")
    _require(_is_claimed(made), "a container must carry our label")
    host = made.pop("HostConfig", None) or {}
    _require(isinstance(host, dict), "HostConfig is no object")
    checks: dict[str, Callable[[Any], bool]] = {
        "CapAdd": lambda v: set(v) <= _CAPABILITIES,
        "SecurityOpt": lambda v: set(v) <= _SECURITY,
        "Sysctls": lambda v: set(v) <= _SYSCTLS,
        "LogConfig": lambda v: set(v) <= {"Type", "Config"} and v.get("Type", "") in _LOGS,
        "Mounts": lambda v: all(_may_mount(mount, volumes) for mount in v),
        "StorageOpt": lambda v: set(v) <= {"size"},
    }
    passed = _only(host, _HOST | set(checks) | {"NetworkMode"}, "a container's HostConfig")
    for name, is_allowed in checks.items():
        if name in passed:
            _require(_holds(is_allowed, passed[name]), f"{name} {str(passed[name])[:200]} is not allowed")
    mode = passed.get("NetworkMode")
    made["HostConfig"] = passed
    return made, _network(mode)


def _network(mode: Any) -> Owned:
    if mode == "none":
        return []
    if not isinstance(mode, str) or mode in ("", "host", "default", "bridge"):
        raise Refused(f"network mode {mode!r} is not allowed: a sandbox has none, its relay's, or a network of ours")
    kind, colon, name = mode.partition(":")
    if not colon:
        return [("network", mode)]
    # It may be created before its relay, and only with the relay there can it be started.
    _require(kind == "container" and _SIDECAR.fullmatch(name) is not None, f"network mode {mode!r} is not allowed")
    return [("container", name)]


def _may_mount(mount: Any, volumes: Collection[str]) -> bool:
    """A named volume of the stack, read-only. A path of the host never: a link in it could lead anywhere by then."""
    # It is passed on as it is: one more key, also an empty one, may be "readonly" to the engine.
    return (
        set(mount) <= {"Type", "Source", "Target", "ReadOnly", "VolumeOptions"}
        and mount.get("Type") == "volume"
        and mount.get("Source") in volumes
        and mount.get("ReadOnly") is True
        and set(mount.get("VolumeOptions") or {}) <= {"NoCopy"}
    )


def command(body: Mapping[str, Any]) -> dict[str, Any]:
    """Of `POST /containers/ID/exec`: no more privileges than the container has. Raises Refused."""
    return _only(body, _EXEC, "a command")


def command_start(body: Mapping[str, Any]) -> dict[str, Any]:
    return _only(body, _EXEC_START, "a command's start")


def network(body: Mapping[str, Any]) -> dict[str, Any]:
    """A bridge of ours, with addresses of the engine's choice. Raises Refused."""
    made = _only(body, {"Name", "Driver", "Options", "CheckDuplicate", "Labels", "Internal"}, "a network")
    _require(_is_claimed(made), "a network must carry our label")
    _require(made.get("Driver", "bridge") == "bridge", "a network must be a bridge")
    allowed = _holds(lambda v: set(v) <= _NETWORK_OPTIONS, made.get("Options") or {})
    _require(allowed, "these options of a network are not allowed")
    return made


def volume(body: Mapping[str, Any]) -> dict[str, Any]:
    """An empty one of the engine's own: by options it could be any folder of the host. Raises Refused."""
    made = _only(body, {"Name", "Driver", "Labels"}, "a volume")
    _require(_is_claimed(made), "a volume must carry our label")
    _require(made.get("Driver", "local") == "local", "a volume must be local")
    return made


def _only(body: Any, allowed: Collection[str], what: str) -> dict[str, Any]:
    """The entries that are set; anything set that is not allowed is refused by name."""
    if not isinstance(body, Mapping):
        raise Refused(f"{what} is no object")
    given = {name: value for name, value in body.items() if not _is_unset(value)}
    if unknown := sorted(set(given) - set(allowed)):
        raise Refused(f"{what} may not set {', '.join(unknown)}")
    return given


def _is_unset(value: Any) -> bool:
    if isinstance(value, Mapping):  # {"Name": ""} says no more than {}
        return all(_is_unset(item) for item in value.values())
    return value is None or value is False or value == 0 or value == "" or value == []


def _is_claimed(made: Mapping[str, Any]) -> bool:
    labels = made.get("Labels")
    return isinstance(labels, Mapping) and CLAIM in labels


def _holds(check: Callable[[Any], bool], value: Any) -> bool:
    try:
        return check(value)
    except (TypeError, AttributeError):
        return False  # of another shape than the engine's API has


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Refused(otherwise)
