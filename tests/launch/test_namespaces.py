"""Whether the container that an owner lived in is still there."""

import subprocess
import sys
from dataclasses import replace

from sandboxes.lifecycle import reap
from sandboxes.namespaces import VARIABLE, has_ended
from sandboxes.ownership import Owner, claim

HOLD = """
import os, sys
from sandboxes import namespaces
namespaces.os.readlink = lambda path: "pid:[4026530001]"
held = namespaces.hold()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_namespace_has_ended_once_nobody_holds_it(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    other = "pid:[4026530001]"
    assert not has_ended(other), "nobody ever said that it lives"
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    assert not has_ended(other)
    registry = tmp_path / "owned"
    here = Owner.current()
    left = claim(registry, "sandbox")
    left.owner = replace(here, pid_namespace=other)
    left.save()
    assert reap(registry) == []
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    assert has_ended(other)
    assert [reaped.id for reaped in reap(registry)] == [left.id], "what a dead container left is reaped by the next"
    monkeypatch.delenv(VARIABLE)
    assert not has_ended(other)
