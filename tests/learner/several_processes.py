"""Learners of several processes: imports TRL once, then forks one process per rank for each order on stdin.

An order is a JSON object (see `Order`); the answer is a JSON list of the ranks' exit statuses, e.g. [0, -9]. What the
run did lies in the order's folder: `reports.json` (one per step), `v<n>.safetensors` (each policy that was published),
`rank<n>.log`, and `checkpoints`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import save_file

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner import rank_watch
from harness_trainer.learner import ranks as ranks_module
from harness_trainer.learner.adapter_transfer import AdapterTransfer
from harness_trainer.learner.checkpoints import last_checkpoint
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.learner.group_source import TrainGroup
from harness_trainer.learner.launch import accelerate_arguments
from harness_trainer.learner.rank_watch import among_peers
from harness_trainer.learner.ranks import Ranks
from harness_trainer.learner.rows import Row
from harness_trainer.learner.train import help_learner, run_learner
from harness_trainer.rollouts.lineage import Lineage
from harness_trainer.rollouts.types import Outcome, RolloutResult


@dataclass
class Order:
    """One run. `fault` is what goes wrong and where: `source` (at that group), `main_dies_at` (that step), `_arm`'s."""

    folder: str
    model: str
    num_processes: int
    layout: str = "ddp"
    config: dict[str, Any] = field(default_factory=dict)
    resume: bool = False
    num_rollouts: int = 3  # of each group
    num_rows: int = 2  # of each rollout
    fault: dict[str, Any] = field(default_factory=dict)
    wait_s: float = 0.0  # for each group
    beat_s: float = 5.0
    timeout_s: float = 60.0
    lost_after_s: float = 60.0


class Transfer:
    """Writes what it is sent where the test finds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.announced = 0

    def next_version(self, version: int) -> None:
        self.announced = version

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        tensors = {name: tensor.clone().contiguous() for name, tensor in iterator}
        save_file(tensors, self.folder / f"v{self.announced}.safetensors")

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class Adapters(AdapterTransfer):
    """Keeps the adapters that it is told to publish; there is no engine."""

    def __init__(self, folder: Path) -> None:
        super().__init__("http://127.0.0.1:9", directory=folder)

    def init_weight_transfer(self) -> None: ...

    def publish(self, version: int) -> None:
        assert (self.folder_of(version) / "adapter_model.safetensors").is_file()


class Source:
    """Groups that depend on their number alone: rollouts of different lengths, off-policy by some tenths of a nat."""

    def __init__(self, order: Order, first: int) -> None:
        self.order = order
        self.next_id = first
        self.version = 0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def check_health(self) -> None:
        if self.order.fault.get("source") == self.next_id:
            raise TrainingFailed("the rollout runner died: see logs/runner.log")

    def policy_changed(self, version: int) -> None:
        self.version = version

    def on_trained(self, group_ids: Any, step: int) -> None: ...

    def on_dropped(self, group_id: int, reason: str) -> None: ...

    def lineage(self) -> Lineage:
        return Lineage({})

    def position(self) -> tuple[int, dict[str, int]]:
        return self.next_id, {}

    def next_group(self, timeout_s: float) -> TrainGroup | None:
        if self.order.wait_s > 0:
            self.order.wait_s -= timeout_s
            time.sleep(timeout_s)
            return None
        group_id = self.next_id
        self.next_id += 1
        count = self.order.num_rollouts
        results = [
            RolloutResult(f"r{group_id}-{i}", group_id, "task", "h", 0, Outcome.OK, (i + group_id) % count / count)
            for i in range(count)
        ]
        return TrainGroup(group_id, "task", results, [self._rows(group_id, i) for i in range(count)])

    def _rows(self, group_id: int, i: int) -> list[Row]:
        numbers = torch.Generator().manual_seed(1000 * group_id + i)
        prompt = [10 + group_id, 5, 6]
        rows = []
        for turn in range(self.order.num_rows):
            length = 2 + i + 3 * turn
            sampled = torch.randint(3, 100, (length,), generator=numbers).tolist()
            logprobs = (-4.5 + 0.5 * torch.randn(length, generator=numbers)).tolist()
            rows.append(
                Row(
                    ids_N=prompt + sampled,
                    mask_N=[0] * len(prompt) + [1] * length,
                    logprobs_N=[0.0] * len(prompt) + logprobs,
                    versions_N=[-1] * len(prompt) + [self.version] * length,
                    turn_ids=[f"t{turn}"],
                    turn_spans=[(len(prompt), len(prompt) + length)],
                )
            )
        return rows


def live(order: Order) -> None:
    """One rank, to its end."""
    torch.set_num_threads(1)
    ranks_module._BEAT_S = order.beat_s
    rank_watch.LOST_AFTER_S = order.lost_after_s
    folder = Path(order.folder)
    settings = {"max_steps": 3, "groups_per_step": 2, "learning_rate": 0.01, "token_budget": 40, "device": "cpu"}
    size = {"num_processes": order.num_processes, "process_timeout_s": order.timeout_s}
    config = LearnerConfig(**(settings | order.config | size))
    is_main = os.environ.get("RANK", "0") == "0"
    signal.signal(signal.SIGTERM, _interrupt if is_main else signal.SIG_DFL)
    try:
        with among_peers(config) as ranks:
            _learn(order, config, folder, ranks)
    except BaseException as error:
        (folder / f"rank{os.environ.get('RANK', '0')}.error").write_text(f"{type(error).__name__}: {error}")
        raise


def _learn(order: Order, config: LearnerConfig, folder: Path, ranks: Ranks) -> None:
    shared: dict[str, Any] = {"model_path": Path(order.model), "output_dir": folder / "checkpoints", "ranks": ranks}
    if not ranks.is_main:
        _arm(order, ranks)
        help_learner(config, **shared)
        return
    resume_from = last_checkpoint(folder / "checkpoints") if order.resume else None
    reports: list[dict[str, Any]] = []

    def on_step(report: Any) -> None:
        reports.append(asdict(report))
        (folder / "reports.json").write_text(json.dumps(reports))
        if order.fault.get("main_dies_at") == report.step:
            os.kill(os.getpid(), signal.SIGKILL)

    steps = 0 if resume_from is None else int(resume_from.name.partition("-")[2])
    run_learner(
        config,
        group_source=Source(order, steps * config.groups_per_step),
        weight_transfer=Adapters(folder / "adapters") if config.weight_sync.type == "lora" else Transfer(folder),
        on_step=on_step,
        resume_from=resume_from,
        base_version=0,
        **shared,
    )


def _arm(order: Order, ranks: Ranks) -> None:
    """`dies_at`, `fails_at`, `stops_at`: when it takes that item (1 = how the run begins, 2 = the first step)."""
    take, taken = ranks.take, 0

    def armed() -> Any:
        nonlocal taken
        taken += 1
        if order.fault.get("dies_at") == taken:
            os.kill(os.getpid(), signal.SIGKILL)
        if order.fault.get("stops_at") == taken:
            os.kill(os.getpid(), signal.SIGSTOP)
        if order.fault.get("fails_at") == taken:
            raise MemoryError("out of memory")
        return take()

    ranks.take = armed  # type: ignore[method-assign]


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def environment(layout: str, num_processes: int) -> dict[str, str]:
    """What `accelerate launch` would tell the processes of our configuration."""
    config = LearnerConfig(num_processes=num_processes, accelerate_config=layout)
    argv = accelerate_arguments(config, Path("spec.json"), 0)
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(argv))
    env: dict[str, str] = prepare_multi_gpu_env(args)
    return {name: value for name, value in env.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


def run(order: Order, env: dict[str, str]) -> list[int]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    pids = []
    for rank in range(order.num_processes):
        pid = os.fork()
        if pid == 0:
            size = str(order.num_processes)
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            if order.num_processes > 1:
                os.environ |= {**env, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ["OMP_NUM_THREADS"] = "1"
            with (Path(order.folder) / f"rank{rank}.log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            try:
                live(order)
                code = 0
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    codes = []
    for pid in pids:
        if "stops_at" in order.fault and pid != pids[0]:
            os.kill(pid, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return codes


def main() -> None:
    environments = {layout: environment(layout, 2) for layout in ("ddp", "fsdp2")}
    for line in sys.stdin:
        order = Order(**json.loads(line))
        print(json.dumps(run(order, environments[order.layout])), flush=True)


if __name__ == "__main__":
    main()
