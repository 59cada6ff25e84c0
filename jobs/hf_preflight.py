"""What can be found out before a job costs anything: each check a plain function that asks little and changes nothing.

Owns the checks, not when they are made: `harness-trainer launch` makes them first, `doctor` may show them. A check
never raises for what it finds, only says so.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs.errors import JobsError
from jobs.hf import asked

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. Example: Check("flavor a10g-large", True, "1x A10G (24 GB), $1.50 an hour")."""

    name: str
    ok: bool
    found: str
    fix: str = ""  # what to do; "" = nothing to mend
    required: bool = True


def check_token(api: HfApi, namespace: str | None = None) -> Check:
    """The token is one, and may act for the namespace."""
    name = "Hugging Face token"
    try:
        who = asked(api.whoami, "the token")
    except JobsError as error:
        return Check(name, False, str(error), "run `hf auth login`, or set HF_TOKEN")
    mine = [str(who["name"]), *(str(org["name"]) for org in who.get("orgs", []))]
    if namespace is not None and namespace not in mine:
        return Check(name, False, f"of {mine[0]}, who is not in {namespace}", f"give --namespace {' or '.join(mine)}")
    return Check(name, True, f"of {who['name']}" + ("" if namespace in (None, mine[0]) else f", for {namespace}"))


def check_flavor(api: HfApi, flavor: str, timeout_s: float | None = None) -> Check:
    """The flavor is one that is offered; what it has, and what it may cost at most."""
    name = f"flavor {flavor}"
    try:
        offered = {one.name: one for one in asked(api.list_jobs_hardware, "the list of flavors")}
    except JobsError as error:
        return Check(name, False, str(error), "try again, or check HF_ENDPOINT")
    if flavor not in offered:
        near = difflib.get_close_matches(flavor, offered, n=3) or sorted(offered)
        return Check(name, False, "not offered", f"give --flavor {', '.join(near)}")
    one = offered[flavor]
    gpu = one.accelerator
    has = f"{one.cpu}, {one.ram}" + ("" if gpu is None else f", {gpu.quantity}x {gpu.model} ({gpu.vram})")
    per_s = {"second": 1, "minute": 60, "hour": 3600}.get(one.unit_label)
    if per_s is None or timeout_s is None:
        return Check(name, True, has)
    hourly, most = one.unit_cost_usd * 3600 / per_s, one.unit_cost_usd * timeout_s / per_s
    return Check(name, True, f"{has}, ${hourly:.2f} an hour, at most ${most:.2f} for this job")


def check_secrets(names: Iterable[str], environ: Mapping[str, str]) -> Check:
    """Every secret that is to be sent has a value here."""
    wanted = list(dict.fromkeys(names))
    missing = [name for name in wanted if not environ.get(name, "").strip()]
    if missing:
        return Check(
            "secrets", False, f"not set here: {', '.join(missing)}", f"export {missing[0]}=..., or leave out --secret"
        )
    return Check("secrets", True, ", ".join(wanted) or "none")


def check_e2b_key(environ: Mapping[str, str]) -> Check:
    """A key that looks like E2B's. Whether it is still good only E2B knows, which the job's start asks first."""
    key = environ.get("E2B_API_KEY", "").strip()
    if not key:
        fix = "export E2B_API_KEY=... (https://e2b.dev/dashboard?tab=keys)"
        return Check("E2B key", False, "E2B_API_KEY is not set here", fix)
    if not key.startswith("e2b_"):
        return Check("E2B key", True, "set, but E2B's keys begin with e2b_", required=False)
    return Check("E2B key", True, "set")


def check_repo(api: HfApi, repo_id: str) -> Check:
    """The repository is there and the token reads it, or it can be made: its owner is one that the token acts for."""
    name = f"repository {repo_id}"
    try:
        if asked(lambda: api.repo_exists(repo_id), name):
            return Check(name, True, "there")
        who = asked(api.whoami, "the token")
    except JobsError as error:
        return Check(name, False, str(error), "run `hf auth login`, or set HF_TOKEN")
    mine = [str(who["name"]), *(str(org["name"]) for org in who.get("orgs", []))]
    owner = repo_id.partition("/")[0]
    if owner not in mine:
        return Check(name, False, f"not there, and the token may make none of {owner}", f"name one of {mine[0]}/...")
    return Check(name, True, "not there yet: it is made, private")
