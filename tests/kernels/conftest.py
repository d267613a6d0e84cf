"""Fixtures for tests of several kernels."""

import platform

import pytest

from swiftkv_jax.kernels.common import native


@pytest.fixture
def narrow(request, monkeypatch) -> str:
    """C++ is compiled, quickly, for an older processor: for vectors of 4 floats, or of 8. What depends on
    their length is in one header for all operations, so one operation tries both."""
    if platform.machine() != "x86_64":
        pytest.skip("needs an x86-64 processor")
    changed = {"-march=native": f"-march={request.param}", "-O3": "-O1"}
    monkeypatch.setattr(native, "FLAGS", tuple(changed.get(flag, flag) for flag in native.FLAGS))
    return request.param
