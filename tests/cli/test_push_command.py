"""`swiftkv push`: an export, and nothing else, goes to the hub."""

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import made
import pytest

import swiftkv_jax as skv
from swiftkv_jax.cli import push


class FakeHub:
    """A fake HfApi that records its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, library_name: str) -> "FakeHub":
        assert library_name == "swiftkv-jax"
        return self

    def create_repo(self, repo: str, private: bool, exist_ok: bool) -> None:
        self.calls.append(("create_repo", repo, private, exist_ok))

    def create_branch(self, repo: str, branch: str, exist_ok: bool) -> None:
        self.calls.append(("create_branch", repo, branch, exist_ok))

    def upload_folder(self, *, repo_id: str, folder_path: Path, revision: str | None, commit_message: str):
        self.calls.append(("upload_folder", repo_id, folder_path, revision))
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo_id}/commit/1")


@pytest.fixture
def hub(monkeypatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    return fake


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run's folder with a student in `export`, beside its teacher's folder."""
    out = tmp_path_factory.mktemp("push")
    model, params = skv.from_pretrained(made.teacher(out / "teacher"))
    student = skv.to_swiftkv(model, params, skv.KVPlan.swiftkv(4, 2))
    skv.save_pretrained(out / "run" / "export", *student)
    return out / "run"


def test_push_creates_a_private_repository_and_a_branch(run, hub):
    assert push.main([str(run / "export"), "me/student", "--private", "--revision", "v2"]) == 0
    assert hub.calls == [
        ("create_repo", "me/student", True, True),
        ("create_branch", "me/student", "v2", True),
        ("upload_folder", "me/student", run / "export", "v2"),
    ]


def test_a_folder_that_is_no_export_is_refused_before_the_hub_is_asked(run, hub, tmp_path, capsys):
    for folder in (run, run.parent / "teacher", tmp_path, tmp_path / "nowhere"):
        assert push.main([str(folder), "me/student"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not hub.calls
    (run.parent / "teacher" / "README.md").write_text("---\nlibrary_name: swiftkv-jax\n---\n")
    push.check_export(run.parent / "teacher")  # a plain model with our card
    (tmp_path / "kv_prediction.json").write_text(json.dumps({"format": 1}))
    push.check_export(tmp_path)  # an adapter
