"""KVPlan: a hand-written table of rows, makers and depth; laws over any row map; every bad plan refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.plan import KVPlan, Prediction, Row

FULL = 2**30

# plan, (source, maker) of each row, what layers read, depth, is SwiftKV, runs of equal layers
TABLE = {
    "standard": (KVPlan.standard(3), ((0, 0), (1, 1), (2, 2)), (0, 1, 2), 2, False, (3,)),
    "one_layer": (KVPlan.standard(1), ((0, 0),), (0,), 0, False, (1,)),
    "split3": (
        KVPlan.swiftkv(6, 3), ((0, 0), (1, 1), (2, 2), (3, 3), (3, 4), (3, 5)), (0, 1, 2, 3, 4, 5), 3, True,
        (3, 3),
    ),
    "pairs": (KVPlan.swiftkv(6, 2, 2), ((0, 0), (1, 1), (2, 2), (2, 4)), (0, 1, 2, 2, 3, 3), 2, True, (2, 4)),
    "ragged": (
        KVPlan.swiftkv(7, 2, 2), ((0, 0), (1, 1), (2, 2), (2, 4), (2, 6)), (0, 1, 2, 2, 3, 3, 4), 2, True,
        (2, 5),
    ),
    "one_group": (KVPlan.swiftkv(5, 1, 9), ((0, 0), (1, 1)), (0, 1, 1, 1, 1), 1, True, (1, 4)),
    "last_layer": (KVPlan.swiftkv(4, 3), ((0, 0), (1, 1), (2, 2), (3, 3)), (0, 1, 2, 3), 3, True, (3, 1)),
    "cross_layer": (KVPlan.from_rows([0, 0, 1, 1]), ((0, 0), (2, 2)), (0, 0, 1, 1), 2, False, (2, 2)),
    "renumbered": (KVPlan.from_rows([7, 7, 3, 3]), ((0, 0), (2, 2)), (0, 0, 1, 1), 2, False, (2, 2)),
    "you_only_cache_once": (
        KVPlan.from_rows([0, 1, 2, 2, 2], split=2), ((0, 0), (1, 1), (2, 2)), (0, 1, 2, 2, 2), 2, True, (2, 3)
    ),
    "back_to_an_early_row": (
        KVPlan.from_rows([0, 1, 2, 0, 3], split=3), ((0, 0), (1, 1), (2, 2), (3, 4)), (0, 1, 2, 0, 3), 3,
        True, (1, 2, 2),
    ),
    "merge_all": (KVPlan.merge_all(3), ((0, 0), (1, 1), (2, 2)), (0, 1, 2), 2, False, (3,)),
}  # fmt: skip


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_rows_reads_depth_and_runs(row):
    plan = row[0]
    made = tuple((row.source, row.maker) for row in plan.rows)
    runs = plan.runs((FULL,) * plan.num_layers)
    assert row[1:] == (made, plan.reads, plan.depth, plan.is_swiftkv, tuple(map(len, runs)))
    assert [layer for run in runs for layer in run] == list(range(plan.num_layers))


def test_runs_end_where_windows_or_forms_change():
    plan = KVPlan.standard(5)
    assert [len(run) for run in plan.runs((4, 4, FULL, FULL, 4))] == [2, 2, 1]
    mixed = plan.stored_as("kv", "kv", "k", "k", "k")
    assert [len(run) for run in mixed.runs((FULL,) * 5)] == [2, 3]
    assert mixed.forms == ("kv", "k") and [mixed.place(row) for row in range(5)] == [0, 1, 0, 1, 2]
    assert mixed.stored("kv") == 2 and mixed.stored("k") == 3


def test_split_at_the_end_is_the_plain_transformer():
    assert KVPlan.swiftkv(6, 6) == KVPlan.standard(6) == KVPlan.swiftkv(6, 6, 4)
    assert hash(KVPlan.swiftkv(6, 6)) == hash(KVPlan.standard(6))


def test_readers_of_a_ragged_plan():
    plan = KVPlan.swiftkv(7, 2, 2)
    assert [plan.readers(row) for row in range(5)] == [(0,), (1,), (2, 3), (4, 5), (6,)]


def test_merge_all_stores_all_rows_in_one_slot():
    plan = KVPlan.merge_all(3)
    assert plan.num_rows == 1 and [plan.place(row) for row in range(3)] == [0, 0, 0]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.data())
def test_any_row_map_satisfies_the_plans_invariants(rows, data):
    split = data.draw(st.integers(1, len(rows)))
    plan = KVPlan.from_rows(rows, split)
    readers = [plan.readers(row) for row in range(plan.num_rows)]
    assert sorted(layer for group in readers for layer in group) == list(range(len(rows)))
    assert all(len({rows[layer] for layer in group}) == 1 for group in readers)
    assert all(group[0] == row.maker for group, row in zip(readers, plan.rows, strict=True))
    assert plan.num_rows == len(set(rows)) and plan.depth <= min(split, len(rows) - 1)
    made = set()  # whatever a layer reads has been made before it runs
    for layer in range(len(rows)):
        made |= set(plan.made_at(layer))
        assert plan.reads[layer] in made
    assert len(made) == plan.num_rows and plan.made_at(plan.depth)


@given(st.integers(1, 9), st.data())
def test_published_fields_describe_every_swiftkv_plan(layers, data):
    split, share = data.draw(st.integers(1, layers)), data.draw(st.integers(1, 9))
    plan = KVPlan.swiftkv(layers, split, share)
    assert KVPlan.swiftkv(layers, *plan.split_and_share) == plan


# base rows, auxiliary rows, auxiliary rows that serve most, how many each of these serves, and each other
SPREADS = [(28, 20, 8, 2, 1), (28, 16, 12, 2, 1), (36, 28, 8, 2, 1), (36, 20, 16, 2, 1), (36, 16, 4, 3, 2)]


@pytest.mark.parametrize("base, aux, first, most, fewest", SPREADS)
def test_spread_is_the_papers_map_for_models_of_one_family(base, aux, first, most, fewest):
    """KV prediction paper, Table 1: OpenELM 1.1B and 3B from 450M, 270M and 1.1B."""
    served = [most] * first + [fewest] * (aux - first)
    reads = tuple(row for row, count in enumerate(served) for _ in range(count))
    assert Prediction.spread(base, aux).reads == reads and len(reads) == base


@pytest.mark.parametrize("rows", [28, 36])
@pytest.mark.parametrize(
    "stays, begins",
    [
        (lambda i: i % 4 != 3, (0, 1, 2, 2, 3, 4, 5, 5)),
        (lambda i: i % 2 == 0, (0, 0, 1, 1, 2, 2, 3, 3)),
        (lambda i: i % 4 == 0, (0, 0, 0, 0, 1, 1, 1, 1)),
    ],
    ids=["0.75", "0.50", "0.25"],
)
def test_nearest_is_the_papers_map_for_layer_pruned_models(rows, stays, begins):
    """KV prediction paper, Tables 1 and 4."""
    reads = Prediction.nearest(rows, [i for i in range(rows) if stays(i)]).reads
    assert reads[:8] == begins and reads[8:] == tuple(read + max(begins) + 1 for read in reads[:-8])


def test_nearest_reads_the_first_kept_row_below_all_of_them():
    assert Prediction.nearest(5, (2, 3), tail=4) == Prediction((0, 0, 0, 1, 1), 4)


BAD = [
    lambda: KVPlan.swiftkv(4, 0),
    lambda: KVPlan.swiftkv(4, 5),
    lambda: KVPlan.from_rows([0, 1], split=3),
    lambda: KVPlan.swiftkv(4, 2, 0),
    lambda: KVPlan.from_rows([]),
    lambda: KVPlan(rows=(Row(0, 0), Row(1, 1)), reads=(0, 0)),
    lambda: KVPlan(rows=(Row(0, 0),), reads=(0, 1)),
    lambda: KVPlan(rows=(Row(1, 1), Row(0, 0)), reads=(1, 0)),
    lambda: KVPlan(rows=(Row(0, 2),), reads=(0, 0)),
    lambda: KVPlan(rows=(Row(1, 1),), reads=(0, 0)),
    lambda: KVPlan(rows=(Row(0, 0), Row(0, 1)), reads=(0, 1)),
    lambda: KVPlan(rows=(Row(0, 0, "kv", True), Row(1, 1, "kv", True)), reads=(0, 1)),
    lambda: KVPlan(rows=(Row(0, 0), Row(1, 1)), reads=(0, 0), cross=(1, 1)),
    lambda: KVPlan(rows=(Row(0, 0), Row("encoder", 0)), reads=(0, 0), cross=(1,)),
    lambda: KVPlan.standard(3).stored_as("k", "kv"),
    lambda: KVPlan.from_rows([0, 1, 2, 0], split=2).split_and_share,
    lambda: KVPlan.merge_all(3).split_and_share,
    lambda: KVPlan.swiftkv(4, 2, tail=-1),
    lambda: KVPlan.swiftkv(4, 4, tail=1),
    lambda: KVPlan.swiftkv(4, 1, 2, tail=1),
    lambda: KVPlan.swiftkv(4, 2, tail=1).stored_as("k"),
    lambda: Prediction(()),
    lambda: Prediction((0, True)),
    lambda: Prediction((0, -1)),
    lambda: Prediction((0,), tail=0),
    lambda: Prediction.spread(4, 0),
    lambda: Prediction.nearest(4, (1, 1)),
    lambda: Prediction.nearest(4, (0, 4)),
]


@pytest.mark.parametrize("make", BAD)
def test_bad_plans_and_predictions_are_refused(make):
    with pytest.raises(UsageError):
        make()


def test_the_layers_of_gemma_3n_that_share_rows_are_a_plan():
    """The last 15 of 35 layers read the row of the last layer of their kind before them: a prompt's tokens
    need not run them, nor the layer that makes the last row, and nothing is approximated."""
    full = [layer % 5 == 4 for layer in range(35)]
    plan = KVPlan.from_rows([layer if layer < 20 else 19 if full[layer] else 18 for layer in range(35)])
    assert (len(plan.rows), plan.depth, plan.has_shared_norm) == (20, 19, False)
    assert all(full[plan.rows[read].maker] == full[layer] for layer, read in enumerate(plan.reads))
