"""The library computes what it did when golden/golden.npz was written; golden/make_golden.py tells how."""

import jax
import numpy as np
import pytest
from golden import cases

pytestmark = pytest.mark.usefixtures("as_users_compile")

TOLERANCE = 1e-5


def quick(some: list, numbers) -> list:
    """Cases with the given numbers as they are, and all others as slow tests."""
    slow = pytest.mark.slow
    return [case if n in numbers else pytest.param(case, marks=slow) for n, case in enumerate(some)]


# By default: of sequences every family, plan and rope; of what is served and trained every other kind of row,
# of head and of what trains.
PLANS = len(cases.PLANS)
LOGITS = quick(
    cases.LOGITS, [n for n in range(len(cases.LOGITS)) if (n % PLANS - 2 * (n // PLANS)) % PLANS < 2]
)
SERVED, TRAINED = quick(cases.SERVED, (1, 4, 7)), quick(cases.TRAINED, (1, 3, 5))


@pytest.fixture(scope="module")
def golden():
    with np.load(cases.GOLDEN) as arrays:
        return dict(arrays)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """XLA's optimisations left out: some hundred programs run once each. Only last bits differ."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def test_every_record_has_its_case(golden):
    records = {"logits": cases.LOGITS, "tokens": cases.SERVED, "seed": cases.SERVED, "names": cases.SAVED}
    for kind in ("metrics", "metric names", "gradients", "gradient names"):
        records[kind] = cases.TRAINED
    assert sorted(golden) == sorted(f"{kind} {case}" for kind, some in records.items() for case in some)


@pytest.mark.parametrize("case", LOGITS, ids=str)
def test_logits_of_whole_sequences(golden, case):
    np.testing.assert_allclose(cases.logits_of(case), golden[f"logits {case}"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_greedy_tokens_in_chunks_from_shared_and_preempted_pages(golden, case):
    np.testing.assert_array_equal(
        cases.tokens_served(case, int(golden[f"seed {case}"])), golden[f"tokens {case}"]
    )


@pytest.mark.parametrize("case", cases.SAVED, ids=str)
def test_saved_tensors_have_their_names_and_shapes_and_load_again(golden, case):
    names, same = cases.stored_tensors(case)
    assert names == golden[f"names {case}"].tobytes().decode().split("\n")
    assert same


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_loss_and_gradients_of_a_training_step(golden, case):
    """A tensor's entries and sum to TOLERANCE of its gradient's norm."""
    metrics, grads = cases.training_step(case)
    assert sorted(grads) == golden[f"gradient names {case}"].tolist()
    for name, want in zip(golden[f"metric names {case}"], golden[f"metrics {case}"], strict=True):
        # Student and teacher are equal before the layer after the split: "hidden" may be 0, or its rounding.
        np.testing.assert_allclose(metrics[name], want, rtol=TOLERANCE, atol=1e-9, err_msg=name)
    for name, want in zip(sorted(grads), golden[f"gradients {case}"], strict=True):
        got = cases.summary(name, grads[name])
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * want[0], err_msg=name)
