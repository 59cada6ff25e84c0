"""How many files a runner may open: many sandboxes elsewhere, and children that should not inherit it."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from types import SimpleNamespace
from harness_trainer.rollouts.__main__ import _allow_files
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
_allow_files(SimpleNamespace(sandbox=SimpleNamespace(type=sys.argv[1])))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
assert hard == most
print("all" if soft == most else soft)
"""


@pytest.mark.parametrize(("sandbox", "allowed"), [("e2b", "all"), ("local", "256")])
def test_a_runner_opens_as_many_files_as_it_may_unless_its_sandboxes_are_its_children(sandbox, allowed):
    done = subprocess.run([sys.executable, "-c", SCRIPT, sandbox], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (allowed, "")
