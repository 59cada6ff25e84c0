"""Ending what dead owners left in E2B: sandboxes found by their metadata.

The same two questions as `docker_reaping.Engine`. Called by `lifecycle.reap` for what is on record, and by the E2B
backend when it opens for what is not. Blocking; imported only when there is something in E2B.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from e2b import Sandbox, SandboxQuery

from sandboxes.docker_labels import CLAIM, dead_owner
from sandboxes.e2b_service import E2B_ERRORS, Connection, said
from sandboxes.ownership import Claim, Owner
from sandboxes.processes import LifecycleError

HOST = "harness-trainer.owner.host"


@dataclass(frozen=True, slots=True)
class Thing:
    """A sandbox. Example: Thing("i3f9..", {"harness-trainer.claim": "e2b-412-98213-0a1b2c3d", ..})."""

    id: str
    labels: dict[str, str]

    def __str__(self) -> str:
        return f"E2B sandbox {self.id}"


@dataclass(slots=True)
class Ended:
    """What was ended of one claim. `problem` "" = nothing of it is left."""

    things: list[Thing] = field(default_factory=list)
    problem: str = ""


class Engine:
    """E2B, to clean. Raises LifecycleError when there is no key."""

    def __init__(self, address: str, *, connection: Connection | None = None) -> None:
        connection = connection or Connection(api_url=address)
        if not connection.has_key:
            raise LifecycleError(
                f"sandboxes may be left in E2B ({address}) and cost money until their lifetime is over: set "
                "E2B_API_KEY and run `harness-trainer clean`"
            )
        self._options = connection.options()
        self._address = address

    def close(self) -> None:
        """Nothing is held open."""

    def find_claim(self, claim_id: str) -> list[Thing]:
        """Raises LifecycleError."""
        return self._find({CLAIM: claim_id})

    def end(self, claims: Sequence[Claim]) -> dict[str, Ended]:
        """End the sandboxes of these claims, whose owners are dead. Raises LifecycleError when E2B does not answer."""
        ended = {claim.id: Ended() for claim in claims}
        # One listing for all: there may be hundreds. What a killed owner asked for this moment and E2B makes only after
        # it is found by the next backend's `sweep`.
        for host in sorted({claim.owner.host for claim in claims}):
            for thing in self._find({HOST: host}):
                if thing.labels.get(CLAIM) in ended:
                    self._kill(thing, ended[thing.labels[CLAIM]])
        return ended

    def sweep(self, here: Owner, own: Collection[str] = (), *, dry_run: bool = False) -> dict[str, Ended]:
        """End the sandboxes of this host whose owners are dead, on record or not, and those of the claims in `own`.

        Never a live owner's. `dry_run` only tells. Raises LifecycleError when E2B does not answer.
        """
        ended: dict[str, Ended] = {}
        for thing in self._find({HOST: here.host}):
            if thing.labels.get(CLAIM) not in own and not dead_owner(thing.labels, here):
                continue
            of = ended.setdefault(thing.labels[CLAIM], Ended())
            if dry_run:
                of.things.append(thing)
            else:
                self._kill(thing, of)
        return ended

    def _find(self, metadata: Mapping[str, str]) -> list[Thing]:
        found: list[Thing] = []
        try:
            pages = Sandbox.list(query=SandboxQuery(metadata=dict(metadata)), limit=100, **self._options)
            while pages.has_next:
                for info in pages.next_items():
                    # A service that ignores a filter it does not know must not make us end a stranger's sandbox.
                    if metadata.items() <= info.metadata.items():
                        found.append(Thing(info.sandbox_id, dict(info.metadata)))
        except E2B_ERRORS as e:
            raise LifecycleError(f"E2B ({self._address}) does not list what was left there: {said(e)}") from e
        return found

    def _kill(self, thing: Thing, of: Ended) -> None:
        try:
            Sandbox.kill(thing.id, **self._options)
            of.things.append(thing)
        except E2B_ERRORS as e:
            of.problem = f"{thing} could not be ended: {said(e)}"


def sweep(*, dry_run: bool = False) -> dict[str, Ended]:
    """`Engine.sweep` of the E2B that the environment names, for the command line."""
    connection = Connection()
    return Engine(connection.address, connection=connection).sweep(Owner.current(), dry_run=dry_run)
