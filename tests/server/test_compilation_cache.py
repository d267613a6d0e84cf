"""The compilation cache of a command: its user's alone, or not used."""

import os

import jax
import pytest

from swiftkv_jax.cli import commands
from swiftkv_jax.common.folder import private


@pytest.fixture
def cached(tmp_path, monkeypatch, capsys):
    """A start of `serve.py`, as far as its cache of programs goes, with a home in `tmp_path`: the folder that
    is then in force, and what was said on stderr."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def start(named: str | None = None) -> tuple[str | None, str]:
        with monkeypatch.context() as patch:
            patch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
            jax.config.update("jax_compilation_cache_dir", named)  # as JAX does when it is imported
            if named:
                patch.setenv("JAX_COMPILATION_CACHE_DIR", named)
            commands.cache_programs()
        return jax.config.jax_compilation_cache_dir, capsys.readouterr().err

    yield start
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_compilation_cache_is_its_users_alone_or_not_used(tmp_path, cached):
    """A user who can write to it, or replace the folder, can run code in the process."""
    cache = tmp_path / "swiftkv-jax" / "xla"
    assert cached() == (str(cache), "")
    assert [folder.stat().st_mode & 0o777 for folder in (cache.parent, cache)] == [0o700] * 2
    cache.chmod(0o770)
    used, said = cached()
    assert used is None and said.count("\n") == 1 and str(cache) in said
    for mode, parents, alone in (
        (0o755, 0o755, True),
        (0o702, 0o700, False),
        (0o1777, 0o700, False),  # where nobody can rename what is there, anybody can still add to it
        (0o700, 0o770, False),
    ):
        cache.chmod(mode)
        cache.parent.chmod(parents)
        assert private(cache) == alone
    cache.parent.chmod(0o700)
    (tmp_path / "file").write_text("")
    assert private(cache) and not private(tmp_path / "file" / "xla")


def test_a_compilation_cache_named_by_the_environment_is_checked_like_our_own(tmp_path, cached, monkeypatch):
    """The cache holds code. Links are resolved first, because their owner could redirect them later."""
    named, link = tmp_path / "of the team" / "cache", tmp_path / "link"
    assert cached(str(named)) == (str(named), "") and named.stat().st_mode & 0o777 == 0o700
    assert cached("gs://b/c") == ("gs://b/c", "")
    assert not (tmp_path / "swiftkv-jax").exists(), "ours is not wanted"
    named.chmod(0o777)
    link.symlink_to(named)
    for path in (named, link):
        used, said = cached(str(path))
        assert used is None and said.count("\n") == 1 and str(named) in said
    named.chmod(0o700)
    for mode, alone in ((0o777, False), (0o1777, True), (0o775, False), (0o755, True)):
        named.parent.chmod(mode)
        assert private(named) == alone, "with the sticky bit only its owner can put another in its place"
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert not private(named), "another's"
