"""Fixtures for tests of several kernels."""

import platform

import pytest

from swiftkv_jax.kernels.common import native


@pytest.fixture(params=["x86-64", "haswell"])
def narrow(request, monkeypatch) -> str:
    """C++ is compiled for an older processor: for vectors of 4 floats, and of 8."""
    if platform.machine() != "x86_64":
        pytest.skip("needs an x86-64 processor")
    flags = (f.replace("-march=native", f"-march={request.param}") for f in native.FLAGS)
    monkeypatch.setattr(native, "FLAGS", tuple(flags))
    return request.param
