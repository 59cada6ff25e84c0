"""What only E2B needs in a new sandbox, before the usual set-up: rights, names, and a note for a successor.

Owns what is closed to the agent there, who commands run as when nobody says so, and the note from which another process
knows the sandbox's spec. Commands are run by who calls, `e2b_sandbox`; `e2b` reads the note.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TypeAlias

from sandboxes import inside
from sandboxes.base import BoxSpec, Limits, Network, NetworkMode, SandboxError
from sandboxes.box_calls import Exec
from sandboxes.e2b_service import E2B_ERRORS, as_sandbox_error

# Runs a command of ours: its exit code, its output and the end of its errors. Raises SandboxError.
Collect: TypeAlias = Callable[[Exec], Awaitable[tuple[int | None, str, str]]]

_SPEC_PATH = "/root/.harness-trainer.json"  # for whoever takes over when this process dies
_DEFAULT_USER, _DEFAULT_FOLDER = "user", "/home/user"  # of a template that sets none; every one has both

# Arguments: names to pin, as lines of /etc/hosts ("" = none), and "1" when commands do not run as root. Its standard
# input is kept for a successor. E2B gives its default user sudo without a password, accounts without passwords and a
# world-writable /usr/local, which comes first in root's PATH: the agent would be root, and could write its own reward.
_PREPARE = f"""
umask 077; cat > {_SPEC_PATH} || exit 1
[ -z "$1" ] || printf '%s\\n' "$1" >> /etc/hosts || exit 1
[ "$2" = 1 ] || exit 0
for f in /usr/bin/sudo /usr/bin/su /bin/su /usr/bin/doas; do [ ! -e $f ] || chmod u-s $f || exit 1; done
chmod -R go-w /usr/local 2>/dev/null
exit 0
"""
_WHO = "id -un && pwd && cd && pwd"


async def defaults_of(template: str, collect: Collect) -> tuple[str, str | None]:
    """The template's own user and working folder (None = it sets none)."""
    code, out, err = await collect(Exec([inside.SHELL, "-c", _WHO]))
    lines = out.splitlines()
    if code != 0 or len(lines) != 3:
        raise SandboxError(f"the E2B template {template!r} does not say who its user is: {err}")
    user, folder, home = lines
    user = _DEFAULT_USER if user == "root" else user
    return user, None if folder in (home, "/", _DEFAULT_FOLDER) else folder


async def prepare(spec: BoxSpec, user: str, workdir: str, hosts: str, collect: Collect) -> None:
    """Before anybody else runs there. `user` and `workdir`: where the spec leaves them open; `hosts`: lines to pin."""
    common = "" if user in ("root", "0") else "1"
    note = json.dumps(_spec_as_json(spec, user, workdir)).encode()
    argv = [inside.SHELL, "-c", _PREPARE, "sh", hosts, common]
    code, _, err = await collect(Exec(argv, user="root", cwd="/", stdin=note))
    if code != 0:
        raise SandboxError(f"the E2B sandbox of {spec.name} could not be prepared: {err}")


async def read_spec(sandbox_id: str, read: Callable[[str], Awaitable[str]]) -> BoxSpec:
    """The spec of a sandbox that another process made. `read`: a file's text, as root; it may raise what the SDK does.

    Raises SandboxError.
    """
    try:
        return _spec_from_json(await read(_SPEC_PATH))
    except (ValueError, KeyError, TypeError) as e:
        raise SandboxError(f"E2B sandbox {sandbox_id} was not made by this version: {e}") from e
    except E2B_ERRORS as e:
        raise as_sandbox_error(e, f"E2B sandbox {sandbox_id} cannot be taken over") from e


def _spec_as_json(spec: BoxSpec, user: str, workdir: str) -> dict[str, object]:
    return {
        "name": spec.name,
        "env": dict(spec.env),
        "user": user,
        "workdir": workdir,
        "limits": asdict(spec.limits),
        "network": {"mode": str(spec.network.mode), "allow": list(spec.network.allow)},
    }


def _spec_from_json(text: str) -> BoxSpec:
    """Raises ValueError, KeyError or TypeError when it is not of `_spec_as_json`'s making."""
    data = json.loads(text)
    network = Network(NetworkMode(data["network"]["mode"]), tuple(data["network"]["allow"]))
    return BoxSpec(
        name=data["name"],
        env=data["env"],
        user=data["user"],
        workdir=data["workdir"],
        limits=Limits(**data["limits"]),
        network=network,
    )
