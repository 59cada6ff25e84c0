"""A stand-in for SLURM on one machine: sbatch, srun, scancel, scontrol, squeue and sacct as one program, by its name.

Jobs are real processes. What it knows is in the folder $SLURM_STANDIN: a script, a state and pids for each job. It
refuses the partition `nowhere`; a job of the partition `full` waits. A cancelled job is killed when a test says so.
squeue has forgotten a job that has ended. Standard library only, because each call is a process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(os.environ.get("SLURM_STANDIN", "."))
NAMES = ("sbatch", "srun", "scancel", "scontrol", "squeue", "sacct")


def install(folder: Path) -> None:
    """Programs of these names, to be put on PATH."""
    folder.mkdir(parents=True)
    for name in NAMES:
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {Path(__file__).absolute()} {name} "$@"\n')
        program.chmod(0o755)


def sbatch(script: str) -> int:
    text = Path(script).read_text()
    partition = re.search(r"#SBATCH --partition=(\S+)", text)
    if partition and partition[1] == "nowhere":
        print("sbatch: error: invalid partition specified: nowhere", file=sys.stderr)
        return 1
    job = str(100 + len(list(ROOT.glob("*.sh"))))
    (ROOT / f"{job}.sh").write_text(text)
    set_state(job, "PENDING")
    if not (partition and partition[1] == "full"):
        start(job)
    print(f"Submitted batch job {job}")
    return 0


def start(job: str) -> None:
    quiet = subprocess.DEVNULL
    argv = [sys.executable, "-SE", __file__, "slurmd", job]
    subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)


def slurmd(job: str) -> int:
    """One job from its start to its end, in all its lives."""
    text = (ROOT / f"{job}.sh").read_text()
    nodes = int(re.search(r"#SBATCH --nodes=(\d+)", text)[1])  # type: ignore[index]
    hosts = "localhost" if nodes == 1 else f"localhost,node[2-{nodes}]"
    env = {**os.environ, "SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": hosts}
    while True:
        (ROOT / f"{job}.pids").unlink(missing_ok=True)
        set_state(job, "RUNNING")
        shell = subprocess.Popen(["bash", str(ROOT / f"{job}.sh")], env=env, start_new_session=True)
        while shell.poll() is None:
            time.sleep(0.02)
            if (ROOT / f"{job}.kill").exists():
                os.killpg(shell.pid, signal.SIGKILL)
        if (ROOT / f"{job}.cancelled").exists():
            set_state(job, "CANCELLED by 1000")
        elif (ROOT / f"{job}.requeue").exists():
            (ROOT / f"{job}.requeue").unlink()
            set_state(job, "PENDING")
            continue
        else:
            set_state(job, "COMPLETED" if shell.returncode == 0 else "FAILED")
        return 0


def srun(*words: str) -> int:
    """One task for each node, all here."""
    rest, output = list(words), ""
    while rest[0].startswith("--"):
        option = rest.pop(0)
        if option == "--output":
            output = rest.pop(0)
    job, nodes = os.environ["SLURM_JOB_ID"], int(os.environ["SLURM_JOB_NUM_NODES"])
    tasks = []
    for rank in range(nodes):
        env = {**os.environ, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_NTASKS": str(nodes)}
        with Path(output.replace("%j", job).replace("%t", str(rank))).open("ab") as log:
            tasks.append(subprocess.Popen(rest, env=env, stdout=log, stderr=subprocess.STDOUT))
    (ROOT / f"{job}.pids").write_text(" ".join(str(task.pid) for task in tasks))
    return max(task.wait() & 0xFF for task in tasks)


def scancel(job: str, option: str = "", number: str = "") -> int:
    if option == "--signal":
        signals = [signal.Signals["SIG" + number.removeprefix("SIG")]]
    else:
        (ROOT / f"{job}.cancelled").touch()
        signals = [signal.SIGCONT, signal.SIGTERM]
        if state_of(job) == "PENDING":
            set_state(job, "CANCELLED by 1000")
    pids = ROOT / f"{job}.pids"
    for pid in pids.read_text().split() if pids.exists() else []:
        for one in signals:
            os.kill(int(pid), one)
    return 0


def kill(job: str) -> None:
    """What SLURM does some time after a cancel."""
    (ROOT / f"{job}.kill").touch()


def scontrol(verb: str, job: str) -> int:
    assert verb == "requeue"
    (ROOT / f"{job}.requeue").touch()
    return 0


def squeue(*words: str) -> int:
    job = next(word for word in words if word.startswith("--jobs=")).removeprefix("--jobs=")
    if state_of(job) not in ("PENDING", "RUNNING"):
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        return 1
    print(f"{state_of(job)}|localhost")
    return 0


def sacct(*words: str) -> int:
    print("JobID|State|NodeList")
    for job in (word for word in words if word.isdigit()):
        print(f"{job}|{state_of(job)}|localhost")
        print(f"{job}.batch|RUNNING|localhost")
    return 0


def state_of(job: str) -> str:
    return (ROOT / f"{job}.state").read_text()


def set_state(job: str, state: str) -> None:
    temporary = ROOT / f"{job}.{os.getpid()}"
    temporary.write_text(state)
    temporary.replace(ROOT / f"{job}.state")


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](*sys.argv[2:]))
