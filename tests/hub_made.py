"""A cache of Hugging Face's hub as downloads leave it, made by hand: hub ids work offline."""

import hashlib
import os
from pathlib import Path

import huggingface_hub.constants
import pytest


class Hub:
    """`HF_HUB_CACHE` of one test; `publish` puts a model in it."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch):
        self.cache = cache
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))  # read at import

    def publish(self, name: str, folder: Path, branch: str = "main") -> str:
        """A copy of a folder's files as the model `name`, at a commit that `branch` leads to; the commit."""
        home = self.cache / f"models--{name.replace('/', '--')}"
        commit = hashlib.sha1(f"{name} {branch}".encode()).hexdigest()
        snapshot = home / "snapshots" / commit
        for made in (home / "refs", home / "blobs", snapshot):
            made.mkdir(parents=True, exist_ok=True)
        (home / "refs" / branch).write_text(commit)
        for path in folder.rglob("*"):
            if path.is_dir():
                continue
            content, link = path.read_bytes(), snapshot / path.relative_to(folder)
            blob = hashlib.sha256(content).hexdigest()
            (home / "blobs" / blob).write_bytes(content)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(Path(os.path.relpath(home / "blobs" / blob, link.parent)))
        return commit
