"""What passes the socket proxy: everything our Docker backend asks for, and none of the ways out of a container."""

import copy
import json
from urllib.parse import quote

import pytest

from sandboxes.docker_sandbox import CAPABILITIES
from sandboxes.socket_proxy import bodies
from sandboxes.socket_proxy.routes import CLAIM, CONTENT, LAYER, Refused, decide, is_ours

VOLUMES = {"stack-sockets"}
BOX = {
    "Image": "python:3.12-slim",
    "Cmd": ["-c", "sleep 1"],
    "Labels": {CLAIM: "sandbox-1"},
    "Healthcheck": {"Test": ["NONE"], "Interval": None},
    "NetworkingConfig": None,
    "HostConfig": {"NetworkMode": "none", "CapDrop": ["ALL"], "CapAdd": list(CAPABILITIES), "Memory": 2**30},
}
RELAY_MOUNT = {"Type": "volume", "Source": "stack-sockets", "Target": "/run/ht", "ReadOnly": True}


def box(**host):
    made = copy.deepcopy(BOX)
    made["HostConfig"] |= host
    return made


def test_a_sandbox_as_we_make_it_passes_and_nothing_is_lost():
    relay = box(Mounts=[{**RELAY_MOUNT, "VolumeOptions": {"NoCopy": True}}], SecurityOpt=["no-new-privileges"])
    made, owned = bodies.container(relay, VOLUMES)
    assert made["HostConfig"] == relay["HostConfig"] and owned == []
    assert made["Labels"] == BOX["Labels"] and "NetworkingConfig" not in made
    _, owned = bodies.container(box(NetworkMode="container:sandbox-1-2-0a1b2c3d-net"), VOLUMES)
    assert owned == [("container", "sandbox-1-2-0a1b2c3d-net")]
    assert bodies.container(box(NetworkMode="network-1-2-0a1b2c3d"), VOLUMES)[1] == [
        ("network", "network-1-2-0a1b2c3d")
    ]


@pytest.mark.parametrize(
    "host",
    [
        {"Privileged": True},
        {"privileged": True},  # the engine takes any case
        {"PRIVILEGED": "yes"},
        {"Binds": ["/:/host"]},
        {"binds": ["/:/host"]},
        {"Mounts": [{"Type": "bind", "Source": "/", "Target": "/host", "ReadOnly": True}]},
        {"Mounts": [{**RELAY_MOUNT, "type": "bind"}]},  # which of the two keys counts is the engine's choice
        {"Mounts": [{**RELAY_MOUNT, "readonly": False}]},  # nothing, and yet the last one counts
        {"Mounts": [{**RELAY_MOUNT, "Source": "somebody-elses"}]},
        {"Mounts": [{**RELAY_MOUNT, "ReadOnly": False}]},
        {"Mounts": [{**RELAY_MOUNT, "VolumeOptions": {"DriverConfig": {"Name": "local", "Options": {"device": "/"}}}}]},
        {"Mounts": "/:/host"},
        {"VolumesFrom": ["database"]},
        {"NetworkMode": "host"},
        {"NetworkMode": "bridge"},
        {"NetworkMode": ""},
        {"NetworkMode": None},
        {"NetworkMode": "container:database"},
        {"NetworkMode": ["host"]},
        {"PidMode": "host"},
        {"IpcMode": "host"},
        {"UTSMode": "host"},
        {"UsernsMode": "host"},
        {"CgroupnsMode": "host"},
        {"CgroupParent": "/"},
        {"CapAdd": ["SYS_ADMIN"]},
        {"CapAdd": ["ALL"]},
        {"SecurityOpt": ["seccomp=unconfined"]},
        {"Devices": [{"PathOnHost": "/dev/sda"}]},
        {"DeviceRequests": [{"Count": -1}]},
        {"DeviceCgroupRules": ["a *:* rwm"]},
        {"Sysctls": {"kernel.core_pattern": "|/x"}},
        {"Runtime": "other"},
        {"PortBindings": {"80/tcp": [{}]}},
        {"MaskedPaths": ["/nothing"]},
        {"LogConfig": {"Type": "syslog"}},
        {"LogConfig": {"Type": "local", "type": "syslog", "Config": {"syslog-address": "unixgram:///x"}}},
        {"StorageOpt": 5},
        {"RestartPolicy": {"Name": "always"}},
    ],
)
def test_no_way_out_of_a_container(host):
    with pytest.raises(Refused):
        bodies.container(box(**host), VOLUMES)


def test_a_container_without_our_label_or_with_a_second_host_config_is_refused():
    with pytest.raises(Refused, match="label"):
        bodies.container({**BOX, "Labels": {}}, VOLUMES)
    with pytest.raises(Refused, match="label"):
        bodies.container({**BOX, "Labels": f"not {CLAIM}"}, VOLUMES)
    with pytest.raises(Refused, match="hostconfig"):
        bodies.container({**BOX, "hostconfig": {"Privileged": True}}, VOLUMES)


def test_commands_networks_and_volumes():
    assert bodies.command({"Cmd": ["id"], "User": "0", "Privileged": False}) == {"Cmd": ["id"], "User": "0"}
    with pytest.raises(Refused, match="Privileged"):
        bodies.command({"Cmd": ["id"], "Privileged": True})
    labels = {CLAIM: "x"}
    assert bodies.network({"Name": "n", "Driver": "bridge", "IPAM": None, "Labels": labels})["Name"] == "n"
    with pytest.raises(Refused, match="bridge"):
        bodies.network({"Name": "n", "Driver": "macvlan", "Labels": labels})
    with pytest.raises(Refused, match="DriverOpts"):
        bodies.volume({"Name": "v", "DriverOpts": {"type": "none", "o": "bind", "device": "/"}, "Labels": labels})


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/v1.41/containers/4f2a/update"),
        ("POST", "/v1.41/containers/4f2a/rename?name=x"),
        ("POST", "/v1.41/containers/4f2a/attach"),
        ("POST", "/v1.41/containers/4f2a/start?checkpoint=a&checkpoint-dir=/tmp/theirs"),
        ("GET", "/v1.41/containers/4f2a/export"),
        ("POST", "/v1.41/commit?container=4f2a"),
        ("POST", "/v1.41/images/load"),
        ("POST", "/v1.41/images/create?fromSrc=http://x"),
        ("POST", "/v1.41/build?t=python:3.12-slim&labels=%7B%22harness-trainer.layer%22%3A%221%22%7D"),
        ("POST", "/v1.41/build?t=harness-trainer/task:1"),
        ("POST", "/v1.41/build?t=harness-trainer/task:1&networkmode=host&labels=%7B%22harness-trainer.layer%22%3A1%7D"),
        ("POST", "/v1.41/build?remote=http://x&labels=%7B%22harness-trainer.layer%22%3A1%7D"),
        ("POST", "/v1.41/build?q=1&Q=2&labels=%7B%22harness-trainer.layer%22%3A1%7D"),
        ("POST", "/v1.41/plugins/pull"),
        ("POST", "/v1.41/swarm/init"),
        ("GET", "/v1.41/secrets"),
        ("POST", "/v1.41/session"),
        ("POST", "/v1.41/grpc"),
        ("DELETE", "/v1.41/containers"),
        ("GET", "/containers/../images/json"),
        ("POST", "/containers/%2e%2e/create"),
        ("GET", "//containers/json"),
        ("GET", "http://other/containers/json"),
        ("PATCH", "/containers/json"),
    ],
)
def test_calls_that_sandboxes_do_not_need_are_refused(method, target):
    with pytest.raises(Refused):
        decide(method, target)


def test_lists_show_only_what_is_ours():
    call = decide("GET", "/v1.41/containers/json?all=1")
    assert quote(json.dumps({"label": [CLAIM]}), safe="").replace("%20", "+") in call.target
    asked = quote(json.dumps({"label": [f"{CLAIM}=sandbox-1"], "dangling": ["true"]}))
    assert "sandbox-1" in decide("GET", f"/v1.41/containers/json?filters={asked}").target
    with pytest.raises(Refused):
        decide("GET", "/v1.41/containers/json?filters=[]")


def test_what_is_named_must_be_ours():
    assert decide("POST", "/v1.41/containers/4f2a/start").owned == (("container", "4f2a"),)
    assert decide("POST", "/v1.41/exec/77/start").owned == (("exec", "77"),)
    assert decide("DELETE", "/v1.41/images/harness-trainer/task:1").owned == (("image", "harness-trainer/task:1"),)
    assert is_ours({CLAIM: "x"}) and is_ours({LAYER: "1"})
    assert not is_ours({LAYER: "1", CONTENT: "x"}), "a person may start a container from a built image"
    assert not is_ours(None)
