"""compose.yaml by itself: who may reach what, whatever Compose makes of it."""

import re
from pathlib import Path

import pytest
import yaml

from harness_trainer.cli import in_compose

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "compose.yaml").read_text()
FILE = yaml.safe_load(TEXT)
SERVICES = FILE["services"]
VARIABLE = re.compile(r"\$\{([A-Z_0-9]+)")


def volumes_of(service: dict) -> list[str]:
    return [v if isinstance(v, str) else f"{v['source']}:{v['target']}" for v in service["volumes"]]


def test_the_engines_socket_is_in_one_container_which_has_nothing_else():
    holders = [name for name, service in SERVICES.items() if any("docker.sock" in v for v in volumes_of(service))]
    assert holders == ["socket-proxy"]
    proxy = SERVICES["socket-proxy"]
    assert proxy["network_mode"] == "none" and proxy["read_only"] and "networks" not in proxy


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_has_more_rights_than_it_needs(name):
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "pid", "devices"} & set(service)
    assert ("ports" in service) == (name == "view")
    assert service["profiles"], "a service without a profile would come up without the rest"


def test_secrets_and_the_internet_are_the_trainers_alone():
    for name, service in SERVICES.items():
        is_trainer = name.startswith("trainer")
        assert ("secrets" in service) == is_trainer
        assert ("outside" in service.get("networks", ())) == is_trainer
    assert FILE["networks"]["model"] == {"internal": True}
    assert all(secret["file"] for secret in FILE["secrets"].values()), "files, byte for byte"


def test_the_socket_proxys_own_socket_is_the_trainers_alone():
    """Engine and gateway, which strangers' requests and a stranger's model reach, cannot ask it for anything."""
    holders = {name for name, one in SERVICES.items() if "docker:/run/harness-trainer/docker" in volumes_of(one)}
    assert holders == {"socket-proxy", *(name for name in SERVICES if name.startswith("trainer"))}
    command = SERVICES["socket-proxy"]["command"]
    listens = command[command.index("--listen") + 1]
    assert listens.startswith("/run/harness-trainer/docker/")
    for name in holders - {"socket-proxy"}:
        told = SERVICES[name]["environment"]
        assert told["DOCKER_HOST"] == f"unix://{listens}"
        # By the name that the trainer removes at the end, which ends the proxy.
        assert Path(listens) == Path(told["HARNESS_TRAINER_PARTS"]).with_name("docker") / "docker.sock"


def test_relays_get_a_volume_with_nothing_but_their_sockets():
    """Whoever may mount it sees neither the Docker socket's proxy nor the orders to engine and gateway."""
    for name in ("gateway", "trainer-cpu"):
        assert {"control:/run/harness-trainer/control", "sockets:/run/harness-trainer/sockets"} <= set(
            volumes_of(SERVICES[name])
        )
    proxy = SERVICES["socket-proxy"]
    assert proxy["command"][-2:] == ["--volume", FILE["volumes"]["sockets"]["name"]]
    assert not any("sockets:" in volume for volume in volumes_of(proxy))


def test_every_setting_is_explained_and_every_explanation_is_of_a_setting():
    used = set(VARIABLE.findall(TEXT))
    explained = set(re.findall(r"^#?([A-Z][A-Z_0-9]*)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    internal = {"VERSION", "INSTALL_PACKAGES", "PIP_EXTRA_INDEX_URL"}
    assert used - internal == explained - {"COMPOSE_PROFILES"}


def test_what_a_profile_starts_depends_on_nothing_outside_it():
    for name, service in SERVICES.items():
        for needed in service.get("depends_on", {}):
            assert set(service["profiles"]) <= set(SERVICES[needed]["profiles"]), (name, needed)
    assert {profile for service in SERVICES.values() for profile in service["profiles"]} == {
        "cpu",
        "gpu",
        "gpu-shared",
        "view",
    }


def test_the_viewer_can_write_nothing_and_is_on_loopback_alone():
    view = SERVICES["view"]
    assert view["read_only"] and view["volumes"] and all(volume.endswith(":ro") for volume in view["volumes"])
    assert [port.partition("$")[0] for port in view["ports"]] == ["127.0.0.1:"]
    assert view["networks"] == ["view"] and [s for s in SERVICES.values() if "view" in s.get("networks", ())] == [view]
    assert FILE["networks"]["view"]["driver_opts"] == {"com.docker.network.bridge.enable_ip_masquerade": "false"}
    assert not {"secrets", "environment", "depends_on"} & set(view)


def test_images_name_versions_and_run_as_nobody_in_particular():
    for file in (ROOT / "docker").glob("*.Dockerfile"):
        text = file.read_text()
        bases = re.findall(r"^ARG (?:BASE|NODE)=(\S+)", text, re.MULTILINE)
        assert bases and all(re.fullmatch(r"\S+:v?\d+\.\d+\.\d+\S*", base) for base in bases), file
        user = re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1]
        assert user == ("0:10001" if file.name.startswith("socket-proxy") else "10001:10001"), file
        assert "PIP_INDEX_URL" not in text.rpartition("\nFROM ")[2], "what pip is told stays in a stage that is dropped"


def test_the_image_context_holds_no_secret_and_no_environment():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*" and ignored.index("docker/secrets") > ignored.index("!docker")


@pytest.mark.parametrize("given", [["--run-dir", "/runs/two"], ["--run-dir=/runs/two"]])
def test_a_person_is_told_where_the_run_really_is(given, capsys):
    in_compose._say_where_to_look(["train", "--plain", *given, "--model", "m"])
    said = capsys.readouterr().err
    assert "--run-dir /runs/two " in said and "/runs/two/metrics.jsonl" in said and "runs/train" not in said
