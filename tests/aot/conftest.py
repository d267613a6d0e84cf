"""Programs for chips that are not here can be compiled but not loaded: caching them gains nothing."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(autouse=True, scope="module")
def compiled_anew(as_users_compile):
    """JAX would write each one, and in a later run fail to read it and compile it again."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it looks at the option once
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
