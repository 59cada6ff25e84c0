"""Whose an object in an engine is, told from its labels and the records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes.docker_labels import CLAIM, MACHINE, dead_owner, image_labels, labels_of, machine_id, read_mark
from sandboxes.ownership import Claim, LifecycleError, Owner, adopt, claim


@pytest.fixture
def mine(tmp_path: Path) -> Claim:
    return claim(tmp_path / "owned", "sandbox", run_id="night-3", engine="docker:unix:///x")


def dead(owner: Owner) -> Owner:
    """A process of this machine with our pid that started earlier."""
    return replace(owner, start_ticks=owner.start_ticks - 1)


def orphaned(made: Claim, **owner: object) -> dict[str, str]:
    """Labels that a dead owner put on a thing whose record is lost."""
    made.release()
    made.owner = replace(dead(made.owner), **owner)  # type: ignore[arg-type]
    return labels_of(made, "container")


def test_labels_are_read_back_as_they_were_written(mine: Claim) -> None:
    mark = read_mark(labels_of(mine, "relay"))
    assert mark is not None
    assert (mark.claim_id, mark.kind, mark.run_id, mark.owner) == (mine.id, "relay", "night-3", mine.owner)
    assert mark.registry == mine.registry
    assert all(isinstance(value, str) for value in labels_of(mine, "relay").values())


@pytest.mark.parametrize("damage", ["absent", "empty", "foreign", "no claim", "no number", "no registry"])
def test_a_thing_without_whole_labels_is_nobodys_to_remove(mine: Claim, damage: str) -> None:
    labels: dict[str, str] | None = orphaned(mine)
    assert labels is not None and dead_owner(labels, Owner.current())
    if damage == "absent":
        labels = None
    elif damage == "empty":
        labels = {}
    elif damage == "foreign":
        labels = {"com.docker.compose.project": "harness-trainer"}
    elif damage == "no claim":
        del labels[CLAIM]
    elif damage == "no number":
        labels["harness-trainer.owner.pid"] = "many"
    else:
        del labels["harness-trainer.registry"]
    assert read_mark(labels) is None and not dead_owner(labels, Owner.current())


def test_a_living_owners_thing_is_not_left_over_with_or_without_a_record(mine: Claim) -> None:
    labels = labels_of(mine, "container")
    assert not dead_owner(labels, Owner.current())
    mine.release()
    assert not dead_owner(labels, Owner.current())


@pytest.mark.parametrize(
    "elsewhere", [{"host": "other"}, {"pid_namespace": "pid:[1]"}, {"host": "other", "boot_id": "earlier"}]
)
def test_owners_of_other_hosts_and_containers_are_never_judged(mine: Claim, elsewhere: dict[str, str]) -> None:
    assert not dead_owner(orphaned(mine, **elsewhere), Owner.current())


def test_an_earlier_boot_of_this_machine_is_dead_and_another_machine_of_its_name_is_not(mine: Claim) -> None:
    labels = orphaned(mine, boot_id="earlier")
    assert not dead_owner({**labels, MACHINE: "another"}, Owner.current())
    assert not dead_owner({**labels, MACHINE: ""}, Owner.current())
    assert dead_owner({**labels, MACHINE: machine_id()}, Owner.current()) is bool(machine_id())


def test_the_record_says_who_owns_an_adopted_thing_now(mine: Claim) -> None:
    mine.owner = dead(mine.owner)
    mine.save()
    labels = labels_of(mine, "container")
    assert dead_owner(labels, Owner.current())
    adopted = adopt(mine.registry, mine.id)
    assert (adopted.owner, adopted.engine, adopted.id) == (Owner.current(), mine.engine, mine.id)
    assert not dead_owner(labels, Owner.current())


def test_what_lives_elsewhere_or_is_gone_cannot_be_adopted(mine: Claim) -> None:
    mine.owner = replace(mine.owner, pid=1, start_ticks=init_ticks())
    mine.save()
    with pytest.raises(LifecycleError, match="belongs to process 1"):
        adopt(mine.registry, mine.id)
    mine.owner = replace(mine.owner, host="other")
    mine.save()
    with pytest.raises(LifecycleError, match="on other"):
        adopt(mine.registry, mine.id)
    mine.release()
    with pytest.raises(LifecycleError, match="not on record"):
        adopt(mine.registry, mine.id)


def init_ticks() -> int:
    return int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])


def test_an_images_labels_never_make_a_container_started_from_it_ours(mine: Claim) -> None:
    inherited = image_labels(mine, task="cheer", content="ab")
    assert not set(inherited) & set(labels_of(mine, "container"))
    assert read_mark(inherited) is None
