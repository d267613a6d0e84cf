"""`swiftkv push DIR REPO`: an exported model to the Hugging Face hub."""

from pathlib import Path

from swiftkv_jax.checkpoint.write import ADAPTER, INDEX, SINGLE
from swiftkv_jax.common.errors import Parser, UsageError, exit_code, first_line
from swiftkv_jax.common.progress import show, working
from swiftkv_jax.config.model import plan_from_hf
from swiftkv_jax.distill.report import LIBRARY


def parser() -> Parser:
    p = Parser(
        description="Upload an exported model to the Hugging Face hub. The token is that of `hf auth login`, "
        "or HF_TOKEN.",
        epilog="example: %(prog)s runs/mine/export me/llama-swiftkv --private",
    )
    p.add_argument("folder", type=Path, metavar="DIR", help="an export, such as runs/mine/export")
    p.flag("REPO", "owner/name on the hub; it is created if it is not there")
    p.flag("--private", "create it for you alone")
    p.flag("--revision BRANCH", "upload to this branch, created from main if need be")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run; exit code 0, 2 for bad usage or no access, 130 for Ctrl-C."""
    return exit_code(lambda: push(**vars(parser().parse_args(argv))), failures=(OSError,))


def push(folder: Path, repo: str, private: bool = False, revision: str | None = None) -> None:
    """Upload an export; print the address of the commit. The hub itself checks the model card."""
    check_export(folder)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = HfApi(library_name=LIBRARY)
    try:
        with working(show, f"uploading {folder} to {repo}"):
            api.create_repo(repo, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo, branch=revision, exist_ok=True)
            message = f"Upload by {LIBRARY}"
            done = api.upload_folder(
                repo_id=repo, folder_path=folder, revision=revision, commit_message=message
            )
    except Exception as error:  # the hub client raises many types; the first line of the message is reported
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        denied = status in (401, 403) or isinstance(error, LocalTokenNotFoundError)
        advice = "; log in with `hf auth login`, or set HF_TOKEN to a token that may write there"
        raise UsageError(f"cannot push to {repo}: {first_line(error)}{advice if denied else ''}") from error
    show(f"uploaded: {done.commit_url}")


def check_export(folder: Path) -> None:
    """Raises UsageError: `folder` is not an export of this library."""
    if (folder / ADAPTER).is_file():
        return
    if not (folder / "config.json").is_file() or not any((folder / n).is_file() for n in (SINGLE, INDEX)):
        inner = folder / "export"
        near = f"; did you mean {inner}?" if inner.is_dir() else ""
        raise UsageError(f"{folder} is not an export: it has no config.json beside weights{near}")
    card = folder / "README.md"
    ours = card.is_file() and f"library_name: {LIBRARY}" in card.read_text(encoding="utf-8", errors="replace")
    plan = plan_from_hf(folder)
    if not ours and plan == plan.full:
        raise UsageError(f"{folder} is not an export: it holds a plain model, without a card of {LIBRARY}")
