"""What a relay container is made of: the files of its image, its command line, and what it may do.

Owns how it is confined and what the guard of a bridge is told of this host. Asks no engine: options are plain data, as
the SDK takes them. Which mode needs a relay, and where it leads, is `docker_network`'s, the only caller; its life is
`docker_sidecar`'s, what runs in it are `relay` and `netguard`.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes import netguard, relay
from sandboxes.base import SandboxError
from sandboxes.docker_labels import PROJECT, labels_of
from sandboxes.docker_sidecar import Places
from sandboxes.docker_volumes import socket_volume
from sandboxes.host_sockets import CONTROL, HostSockets
from sandboxes.ownership import Claim

FOLDER_LABEL = f"{PROJECT}.sockets"  # of a relay: the folder of the run's sockets, for whoever takes it over
_USER = 65532  # "nonroot" in many images; nobody on the host
_SOCKETS = "/run/ht"  # in the relay
_MEMORY = 256 * 2**20  # bytes; a cap: an idle relay needs a twentieth
# Of one sandbox to one service at once. More are refused: the gateway and this process have files for all sandboxes,
# and one that opens thousands must not take them from the others.
_MAX_CONNECTIONS = 256
_IPV6_OFF = {"net.ipv6.conf.all.disable_ipv6": "1", "net.ipv6.conf.default.disable_ipv6": "1"}
_RESOLVERS = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))


@dataclass(frozen=True, slots=True)
class Bridge:
    """The network of a relay that lets its sandbox out, and `guard_options`; [] = nothing is known of the host."""

    network: str
    guard: Sequence[str]


def container(
    name: str,
    image: str,
    owner: Claim,
    *,
    relayed: Mapping[int, str],
    sockets: HostSockets | None,
    bridge: Bridge | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments for the SDK's create_container, all but `host_config`, and those for its create_host_config.

    `relayed`: port on the sandbox's loopback -> service of `sockets`; without these it leads nowhere. `bridge` None =
    loopback only.
    """
    command = ["/relay.py", "--max-connections", str(_MAX_CONNECTIONS)]
    labels = labels_of(owner, "relay")
    places = Places(_SOCKETS, socket_volume())
    if sockets is not None:
        labels[FOLDER_LABEL] = str(sockets.folder)
        announce = places.inside(sockets.folder / CONTROL, _SOCKETS)
        for port, service in relayed.items():
            command.append(f"127.0.0.1:{port}={places.inside(sockets.path(service), f'{_SOCKETS}-{service}')}")
        command += ["--announce", announce, name]
    host = _confined() | {"mounts": places.mounts}
    if bridge is not None:
        # Root for as long as it takes to close the ways out.
        guard = ["/netguard.py", "--user", str(_USER), *bridge.guard, "--", "python3", "-I"]
        host |= {"network_mode": bridge.network, "cap_add": ["NET_ADMIN", "SETUID", "SETGID"], "sysctls": _no_ipv6()}
        user, command = "0:0", [*guard, *command]
    else:
        host |= alone()
        user = f"{_USER}:{_USER}"
    options = {
        "image": image,
        "entrypoint": ["python3", "-I"],
        "command": command,
        "user": user,
        "hostname": "sandbox",
        "labels": labels,
        "use_config_proxy": False,
    }
    return options, host


def _confined() -> dict[str, Any]:
    return {
        "read_only": True,
        "cap_drop": ["ALL"],
        # SELinux lets no labelled container connect to a socket of the host's.
        "security_opt": ["no-new-privileges", "label=disable"],
        "mem_limit": _MEMORY,
        "memswap_limit": _MEMORY,
        "pids_limit": 32,
        "nano_cpus": 10**9,  # a sandbox that floods its relay slows itself down, not the host
        "ulimits": [{"name": "nofile", "soft": 2**14, "hard": 2**14}],
        "log_config": {"type": "json-file", "config": {"max-size": "100k", "max-file": "1"}},
    }


def alone() -> dict[str, Any]:
    """Loopback only. The resolver's address answers at once that nobody is there, and tells nothing of this host's."""
    return {"network_mode": "none", "dns": ["127.0.0.1"], "dns_search": ["."], "sysctls": _no_ipv6()}


def _no_ipv6() -> dict[str, str]:
    """Where the kernel has no IPv6 there is no such setting, and naming it would fail."""
    return _IPV6_OFF if Path("/proc/sys/net/ipv6").exists() else {}


def guard_options() -> list[str]:
    """What the guard is told of this host: its addresses, and the resolvers that Docker will ask."""
    options = [f"--closed={address}/32" for address in own_addresses(Path("/proc/net/fib_trie").read_text())]
    for file in _RESOLVERS:
        with contextlib.suppress(OSError):
            options += [f"--resolver={server}" for server in netguard.known_resolvers(file.read_text())]
    return options


def own_addresses(trie: str) -> list[str]:
    """The IPv4 addresses of this machine's interfaces, loopback's left out, in the text of /proc/net/fib_trie."""
    found, last = [], ""
    for line in trie.splitlines():
        line = line.strip()
        if line.startswith(("|-- ", "+-- ")):
            last = line[4:].split("/")[0].split()[0]
        elif line == "/32 host LOCAL" and not ipaddress.IPv4Address(last).is_loopback:
            found.append(last)
    return sorted(set(found))


def image_folder(folder: Path, base: str) -> Path:
    """The relay's image to build, in a folder of the run's: a base that has a python3, and two files of ours."""
    files = [Path(str(module.__file__)) for module in (relay, netguard)]
    folder = folder / "relay"
    try:
        folder.mkdir(exist_ok=True)
        for file in files:
            (folder / file.name).write_bytes(file.read_bytes())
            (folder / file.name).chmod(0o644)
        lines = [f"FROM {base}", *(f"COPY {file.name} /{file.name}" for file in files)]
        (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
        (folder / "Dockerfile").chmod(0o644)
    except OSError as error:
        raise SandboxError(f"cannot write to {folder}: {error}; free space or set TMPDIR") from error
    return folder
