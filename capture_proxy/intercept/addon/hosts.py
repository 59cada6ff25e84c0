"""Names of hosts: lists of them, and how they are compared and shown. Called by `hooks`."""

from __future__ import annotations

from typing import TypeAlias

Address: TypeAlias = tuple[str, int]  # host, port


class Hosts:
    """A list of host names: exact or "*.suffix", with ":PORT", ":*" (any) or no port (80 and 443)."""

    def __init__(self, entries: list[str]) -> None:
        self._entries = [self._parse(entry) for entry in entries]

    @staticmethod
    def _parse(entry: str) -> tuple[str, frozenset[int] | None]:
        host, colon, port = entry.lower().rpartition(":")
        if not colon or entry.endswith("]"):
            return entry.lower().strip("[]"), frozenset((80, 443))
        return host.strip("[]"), None if port == "*" else frozenset((int(port),))

    def __contains__(self, address: Address) -> bool:
        host, port = address
        return any(name_matches(name, host) and (ports is None or port in ports) for name, ports in self._entries)


def name_matches(name: str, host: str) -> bool:
    return host.endswith(name[1:]) and len(host) > len(name) - 1 if name.startswith("*.") else host == name


def normal(host: str) -> str:
    return host.lower().removesuffix(".").strip("[]")


def shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
