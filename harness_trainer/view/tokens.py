"""Token ids as text, one by one, by the tokenizer of the run's model; where there is none, ids are all that is shown.

Owns finding the tokenizer's file and saying which tokens make a character together. Loaded at first use. The file is
the model's, beside its weights; no model is loaded.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_trainer.rundir import RunDir

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE = "tokenizer.json"


class TokenTexts:
    """Of one run."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._tried: Path | None = None

    def texts(self, ids: Sequence[int]) -> list[str] | None:
        """A text per id; "" = part of a character that a later token ends. None = no tokenizer is at hand."""
        with self._lock:
            tokenizer = self._loaded()
        if tokenizer is None:
            return None
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        texts = []
        for token in ids:
            if not 0 <= token < 2**32 or tokenizer.id_to_token(token) is None:
                texts.append("\ufffd")  # the model has more ids than its tokenizer has texts
                stream = DecodeStream(skip_special_tokens=False)
                continue
            try:
                texts.append(stream.step(tokenizer, token) or "")
            except Exception:  # the library raises Exception itself: bytes that cannot be put together
                texts.append("\ufffd")
                stream = DecodeStream(skip_special_tokens=False)
        return texts

    def _loaded(self) -> Tokenizer | None:
        path = self._find()
        if path is None or path == self._tried:
            return self._tokenizer
        self._tried = path
        try:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception:  # as above: not a tokenizer's file, or of another version
            self._tokenizer = None
        return self._tokenizer

    def _find(self) -> Path | None:
        """Where the supervisor has told its parts that the model is."""
        runner, learner = _json(self._run.internal / "runner.json"), _json(self._run.internal / "learner.json")
        pipeline = runner.get("pipeline")
        folders = [pipeline.get("tokenizer") if isinstance(pipeline, dict) else None, learner.get("model_path")]
        named = [Path(folder) / _FILE for folder in folders if isinstance(folder, str) and folder]
        return next((path for path in named if path.is_file()), None)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
