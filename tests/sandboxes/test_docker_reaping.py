"""What reaping removes from a real Docker engine, and what it never touches."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest
from engine_state import dead_claim, objects_of, opened

from sandboxes.docker_labels import labels_of
from sandboxes.docker_reaping import Engine
from sandboxes.lifecycle import Claim, Owner, adopt, claim, reap

MakeThings = Callable[[Claim], None]


@pytest.fixture
def api(docker_engine: str) -> Iterator[docker.APIClient]:
    with opened(docker_engine) as client:
        yield client


@pytest.fixture
def make(api: docker.APIClient, docker_base_image: str, registry: Path) -> Iterator[MakeThings]:
    """All a sandbox may have: two containers, one of them stubborn, a network, a volume, an anonymous one, an image."""

    def make(owned: Claim) -> None:
        network = api.create_network(f"{owned.id}-net", labels=labels_of(owned, "network"))["Id"]
        api.create_volume(f"{owned.id}-vol", labels=labels_of(owned, "volume"))
        for name, command in (("box", 'trap "" TERM; while :; do sleep 1; done'), ("relay", "exit 0")):
            container = api.create_container(
                docker_base_image,
                ["bash", "-c", command],
                name=f"{owned.id}-{name}",
                labels=labels_of(owned, "container"),
                volumes=["/anonymous", "/named"],
                host_config=api.create_host_config(network_mode=network, binds=[f"{owned.id}-vol:/named"]),
            )["Id"]
            api.start(container)
        api.commit(f"{owned.id}-box")  # as a workspace is kept for a fresh verifier: it inherits the labels

    yield make
    for name in objects_of(api, registry):  # of tests that leave something on purpose
        kind, _, name = name.partition(" ")
        if kind == "container":
            api.remove_container(name.lstrip("/"), v=True, force=True)
        elif kind == "network":
            api.remove_network(name)
        elif kind == "volume":
            api.remove_volume(name)
        else:
            api.remove_image(name, force=True)


def test_everything_of_a_dead_owner_goes_and_a_live_ones_stays(
    api: docker.APIClient, make: MakeThings, registry: Path, docker_engine: str
) -> None:
    dead = dead_claim(registry, "sandbox", docker_engine)
    make(dead)
    live = claim(registry, "sandbox", engine=dead.engine)
    make(live)
    others = [name for name in objects_of(api, registry) if live.id in name]
    anonymous = {m["Name"] for m in api.inspect_container(f"{dead.id}-box")["Mounts"]} - {f"{dead.id}-vol"}
    assert len(anonymous) == 1

    (planned,) = reap(registry, dry_run=True)
    assert len(objects_of(api, registry)) == 10
    (reaped,) = reap(registry)

    assert (reaped.id, reaped.problem) == (dead.id, "")
    assert sorted(reaped.objects) == sorted(planned.objects) and len(reaped.objects) == 5
    left = objects_of(api, registry)
    assert [name for name in left if dead.id in name] == []
    assert sorted(name for name in left if not name.startswith("image")) == sorted(others)
    assert len(left) == 5
    assert {p.stem for p in registry.glob("*.json")} == {live.id}
    live.owner = dead.owner
    live.save()
    reap(registry)
    assert objects_of(api, registry) == []
    assert not anonymous & {v["Name"] for v in api.volumes()["Volumes"] or []}


def test_what_a_lost_record_leaves_is_found_by_its_labels(
    api: docker.APIClient, make: MakeThings, registry: Path, docker_engine: str
) -> None:
    dead, live = dead_claim(registry, "sandbox", docker_engine), claim(registry, "sandbox")
    elsewhere = dead_claim(registry, "sandbox", docker_engine, host="other")
    for owned in (dead, live, elsewhere):
        make(owned)
        owned.release()
    engine = Engine(docker_engine)
    told = engine.left_overs(Owner.current())
    swept = engine.sweep(Owner.current())
    engine.close()
    if dead.id in swept:  # else another run that starts on this engine was first
        assert dead.id in told and len(swept[dead.id].things) == 5 and swept[dead.id].problem == ""
    left = objects_of(api, registry)
    assert not any(dead.id in name for name in left)
    assert len(left) == 10, "a live owner's things, and those of another host"


def test_sweeping_leaves_what_a_record_still_speaks_for(
    api: docker.APIClient, make: MakeThings, registry: Path, docker_engine: str
) -> None:
    adopted = dead_claim(registry, "sandbox", docker_engine)
    make(adopted)
    adopt(registry, adopted.id)
    assert reap(registry) == []
    engine = Engine(docker_engine)
    assert adopted.id not in engine.sweep(Owner.current())
    engine.close()
    assert len(objects_of(api, registry)) == 5


def test_many_reapers_at_once_end_everything_and_report_no_problem(
    api: docker.APIClient, make: MakeThings, registry: Path, docker_engine: str
) -> None:
    for _ in range(3):
        make(dead_claim(registry, "sandbox", docker_engine))
    problems: list[str] = []

    def work() -> None:
        problems.extend(r.problem for r in reap(registry))
        engine = Engine(docker_engine)
        problems.extend(e.problem for e in engine.sweep(Owner.current()).values())
        engine.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(problems) == {""}
    assert objects_of(api, registry) == [] and list(registry.iterdir()) == []


def test_an_engine_that_does_not_answer_keeps_the_record_but_not_the_folders(registry: Path, tmp_path: Path) -> None:
    record = dead_claim(registry, "sandbox", f"unix://{tmp_path}/no.sock")
    folder = record.make_folder(tmp_path / "root")
    (reaped,) = reap(registry)
    assert "does not answer" in reaped.problem and str(tmp_path) in reaped.problem
    assert reaped.folders == [str(folder)] and not folder.exists()
    assert [p.stem for p in registry.glob("*.json")] == [record.id]
    record.release()


def test_things_of_an_unknown_kind_of_engine_stay_on_record(registry: Path) -> None:
    record = dead_claim(registry, "sandbox", "")
    record.engine = "future:address"
    record.save()
    (reaped,) = reap(registry)
    assert "future:address" in reaped.problem
    assert (registry / f"{record.id}.json").exists()


def test_records_without_things_in_an_engine_never_load_docker(registry: Path) -> None:
    plain = dead_claim(registry, "sandbox", "")
    plain.engine = ""
    plain.save()
    claim(registry, "sandbox", engine="docker:unix:///nowhere")  # alive: its engine must not be asked
    script = (
        "import sys; from pathlib import Path; from sandboxes.lifecycle import reap;"
        "print(len(reap(Path(sys.argv[1])))); print('docker' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, registry], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]


def test_the_supervisor_of_a_dead_runner_clears_the_engine_too(
    api: docker.APIClient, make: MakeThings, registry: Path, docker_engine: str
) -> None:
    """It runs without site packages, so it must find the SDK by itself."""
    make(dead_claim(registry, "sandbox", docker_engine))
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from sandboxes.lifecycle import reap;"
        "assert 'site' not in sys.modules; print([r.problem for r in reap(Path(sys.argv[2]))])"
    )
    root = Path(__file__).parent.parent.parent
    argv = [sys.executable, "-I", "-S", "-c", script, str(root), str(registry)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['']"
    assert objects_of(api, registry) == []


def test_what_the_engine_makes_after_its_client_was_killed_is_still_removed(
    api: docker.APIClient, docker_base_image: str, registry: Path, docker_engine: str
) -> None:
    """The request to create is on its way when the reaper looks first."""
    dead = dead_claim(registry, "sandbox", docker_engine)
    dead.created_at += 3600  # just now
    dead.save()
    late = threading.Timer(
        0.25, lambda: api.create_container(docker_base_image, ["true"], labels=labels_of(dead, "container"))
    )
    late.start()
    (reaped,) = reap(registry)
    late.join()
    assert len(reaped.objects) == 1 and objects_of(api, registry) == []
