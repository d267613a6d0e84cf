"""Expert MLPs: every implementation equals the definition, with its gradients; tiles waste few rows."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes_made import found_on

from swiftkv_jax.kernels.check.calls import verdict
from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.expert_mlp import api, cases, mosaic, reference, xla

CALLS = [("xla", case) for case in cases.SMALL]
CALLS += [("xla_groups", name) for name, case in cases.SMALL.items() if not case.eight_bit]


@pytest.mark.slow("xla_groups-all_on_one", "xla_groups-every_expert", "xla-fewer_than_experts")
@pytest.mark.parametrize("implementation, case", CALLS)
def test_sums_and_gradients_are_the_definitions(implementation, case):
    said = verdict([(case, cases.SMALL[case])], implementation)
    assert said["right"], said


def test_the_definition_is_a_sum_over_chosen_experts():
    (x, chosen, weights, gate, up, down, _), _ = cases.SMALL["plain"].make()
    got = reference.expert_mlp(x[0], chosen[0], weights[0], gate, up, down, activation=jax.nn.silu)
    for token, (some, shares) in enumerate(zip(chosen[0], weights[0], strict=True)):
        each = [(jax.nn.silu(x[0, token] @ gate[e]) * (x[0, token] @ up[e])) @ down[e] for e in some]
        want = sum(share * y for share, y in zip(shares, each, strict=True))
        np.testing.assert_allclose(got[token], want, atol=1e-6)


def test_few_tokens_of_a_gpu_run_all_experts(monkeypatch):
    """And tiles are as many as any choice needs: the forms of a GPU, which no CPU takes by itself."""
    monkeypatch.setattr(xla, "static_loops", lambda asked: True)
    for case in ("plain", "empty_experts", "int8", "fp8"):
        said = verdict([(case, cases.SMALL[case])], "xla")
        assert said["right"], said


def test_what_surrounds_the_kernel_of_a_gpu_is_right(monkeypatch):
    """Only an H100 can run JAX's kernel; the same product takes its place."""
    monkeypatch.setitem(api.EXPERT_MLP, "xla_groups", dispatch.Implementation(mosaic.expert_mlp))
    monkeypatch.setattr(mosaic, "_product", xla.ragged)
    for case in ("all_on_one", "more_than_a_group_takes"):
        said = verdict([(case, cases.SMALL[case])], "xla_groups")
        assert said["right"], said


tiles = jax.jit(xla._tiles, static_argnums=1)


@given(
    chosen=st.integers(1, 3).flatmap(
        lambda n: st.lists(st.integers(0, 7), min_size=100 * n, max_size=100 * n)
    ),
    experts=st.sampled_from((1, 4, 7)),  # with few sizes, so that few programs are compiled
)
def test_every_assignment_is_in_one_tile_of_its_expert(chosen, experts):
    """An expert from `experts` on belongs to another device."""
    flat = np.array(chosen)
    number, expert, assigned = jax.device_get(tiles(flat[:, None], experts))
    live = assigned < len(flat)
    assert sorted(assigned[live]) == np.flatnonzero(flat < experts).tolist()
    for one, row in zip(expert, assigned, strict=True):
        assert set(flat[row[row < len(flat)]]) <= {one}
    assert not live[number:].any()


@pytest.mark.parametrize("case", ["v2_lite", "mixtral_8x7b"])
def test_at_most_a_sixth_of_the_work_is_on_empty_rows(case):
    real = cases.REAL[case]
    assignments = real.tokens * real.per_token
    tile = xla.tile_of(assignments, real.experts)
    assert xla.most_tiles(assignments, real.experts, tile) * tile < 1.2 * assignments


@functools.cache
def on_four() -> dict:
    return found_on(4, "sharded_worker.py", "experts (1, 1, 4)", "experts (2, 1, 2)", "experts (1, 2, 2)")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["experts (1, 1, 4)", "experts (2, 1, 2)", "experts (1, 2, 2)"])
def test_four_devices_give_the_sums_and_gradients_of_one(mesh):
    said = on_four()[mesh]
    assert said["worst"] < 1e-5 and said["reduced"] == 1, said


def test_what_does_not_fit_is_refused_in_one_line():
    with pytest.raises(dispatch.UnsupportedError, match="xla_groups does not support experts in 8 bits"):
        cases.SMALL["int8"].by("xla_groups")(*cases.SMALL["int8"].make()[0])
    (x, chosen, weights, gate, up, down, _), _ = cases.SMALL["plain"].make()
    with pytest.raises(dispatch.UnsupportedError, match="it has reference, xla, xla_groups, mosaic_groups"):
        api.expert_mlp(x, chosen, weights, gate, up, down, implementation="splash")
    mesh = jax.sharding.AbstractMesh((1, 1, 1, 3), ("data", "fsdp", "context", "tensor"))
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.raises(dispatch.UnsupportedError, match="8 experts do not divide among 3 devices"),
    ):
        api.expert_mlp(x, chosen, weights, gate, up, down, shards=api.Shards(heads=("tensor",)))
