"""KVPlan: a hand-written table of rows, makers and depth; laws over any row map; every bad plan refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv_jax.errors import UsageError
from swiftkv_jax.plan import KVPlan

# plan, rows, makers, depth, lower makers, upper makers, rows that `fill` writes, is SwiftKV, stackable
TABLE = {
    "standard": (KVPlan.standard(3), (0, 1, 2), (0, 1, 2), 2, (0, 1), (2,), (2,), False, True),
    "one_layer": (KVPlan.standard(1), (0,), (0,), 0, (), (0,), (0,), False, True),
    "split3": (
        KVPlan.swiftkv(6, 3),
        (0, 1, 2, 3, 4, 5),
        (0, 1, 2, 3, 4, 5),
        3,
        (0, 1, 2),
        (3, 4, 5),
        (3, 4, 5),
        True,
        True,
    ),
    "pairs": (
        KVPlan.swiftkv(6, 2, 2),
        (0, 1, 2, 2, 3, 3),
        (0, 1, 2, 4),
        2,
        (0, 1),
        (2, 4),
        (2, 3),
        True,
        True,
    ),
    "ragged": (
        KVPlan.swiftkv(7, 2, 2),
        (0, 1, 2, 2, 3, 3, 4),
        (0, 1, 2, 4, 6),
        2,
        (0, 1),
        (2, 4, 6),
        (2, 3, 4),
        True,
        True,
    ),
    "one_group": (KVPlan.swiftkv(5, 1, 9), (0, 1, 1, 1, 1), (0, 1), 1, (0,), (1,), (1,), True, True),
    "last_layer": (KVPlan.swiftkv(4, 3), (0, 1, 2, 3), (0, 1, 2, 3), 3, (0, 1, 2), (3,), (3,), True, True),
    "cross_layer": (KVPlan.from_rows([0, 0, 1, 1]), (0, 0, 1, 1), (0, 2), 2, (0,), (2,), (1,), False, False),
    "you_only_cache_once": (
        KVPlan.from_rows([0, 1, 2, 2, 2], split=2),
        (0, 1, 2, 2, 2),
        (0, 1, 2),
        2,
        (0, 1),
        (2,),
        (2,),
        True,
        True,
    ),
    "back_to_an_early_row": (
        KVPlan.from_rows([0, 1, 2, 0, 3], split=3),
        (0, 1, 2, 0, 3),
        (0, 1, 2, 4),
        3,
        (0, 1, 2),
        (4,),
        (3,),
        True,
        False,
    ),
    "merge_all": (KVPlan.merge_all(3), (0, 0, 0), (0, 1, 2), 2, (0, 1), (2,), (0,), False, False),
}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_rows_makers_and_depth(row):
    plan = row[0]
    assert row[1:] == (
        plan.rows,
        plan.makers,
        plan.depth,
        plan.lower_makers,
        plan.upper_makers,
        plan.upper_rows,
        plan.is_swiftkv,
        plan.stackable,
    )


def test_split_at_the_end_is_the_plain_transformer():
    assert KVPlan.swiftkv(6, 6) == KVPlan.standard(6) == KVPlan.swiftkv(6, 6, 4)
    assert hash(KVPlan.swiftkv(6, 6)) == hash(KVPlan.standard(6))


@pytest.mark.parametrize("share, rows", [(1, 32), (2, 24), (4, 20), (8, 18), (16, 17)])
def test_rows_of_the_paper(share, rows):
    """SwiftKV paper, Table 2, Llama-3.1-8B at 50 %: cache reductions of 0, 25, 37.5, 43.75 and 46.9 %."""
    plan = KVPlan.swiftkv(32, 16, share)
    assert plan.num_rows == rows and plan.depth == 16
    assert plan.split_and_share == (16, share)


def test_groups_of_a_ragged_plan():
    plan = KVPlan.swiftkv(7, 2, 2)
    assert [plan.owner(j) for j in range(7)] == [0, 1, 2, 2, 4, 4, 6]
    assert [plan.group(m) for m in plan.makers] == [(0,), (1,), (2, 3), (4, 5), (6,)]
    assert [KVPlan.merge_all(3).owner(j) for j in range(3)] == [0, 1, 2]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.data())
def test_laws_of_any_row_map(raw, data):
    rows = [sorted(set(raw)).index(row) for row in raw]
    split = data.draw(st.integers(1, len(rows)))
    plan = KVPlan.from_rows(rows, split)
    groups = [plan.group(maker) for maker in plan.makers]
    assert sorted(layer for group in groups for layer in group) == list(range(len(rows)))
    assert all(group[0] == maker for group, maker in zip(groups, plan.makers, strict=True))
    assert len(plan.makers) == plan.num_rows and plan.depth <= min(split, len(rows) - 1)
    assert plan.lower_makers + plan.upper_makers == plan.makers and plan.upper_makers
    # Whatever is read above depth is there: made below, or written by fill.
    made = {plan.rows[m] for m in plan.lower_makers} | set(plan.upper_rows)
    assert set(plan.rows[plan.depth :]) <= made


@given(st.integers(1, 9), st.data())
def test_published_fields_describe_every_swiftkv_plan(layers, data):
    split, share = data.draw(st.integers(1, layers)), data.draw(st.integers(1, 9))
    plan = KVPlan.swiftkv(layers, split, share)
    assert KVPlan.swiftkv(layers, *plan.split_and_share) == plan


BAD = {
    "split_zero": (lambda: KVPlan.swiftkv(4, 0), r"split must be in \[1, 4\] for 4 layers, not 0"),
    "split_high": (lambda: KVPlan.swiftkv(4, 5), r"split must be in \[1, 4\] for 4 layers, not 5"),
    "split_of_rows": (lambda: KVPlan.from_rows([0, 1], split=3), r"split must be in \[1, 2\]"),
    "share_zero": (lambda: KVPlan.swiftkv(4, 2, 0), "share must be at least 1, not 0"),
    "no_layers": (lambda: KVPlan.from_rows([]), "needs at least one layer"),
    "gap": (lambda: KVPlan.from_rows([0, 2]), r"rows must use every number from 0 to 2, not \(0, 2\)"),
    "negative": (lambda: KVPlan.from_rows([-1, 0]), "rows must use every number"),
    "unsorted": (lambda: KVPlan(rows=(0, 1), makers=(1, 0), split=2), "makers must be ascending"),
    "not_a_layer": (
        lambda: KVPlan(rows=(0, 1), makers=(0, 1, 2), split=2),
        r"makers must be ascending layers in",
    ),
    "orphan": (
        lambda: KVPlan(rows=(0, 1, 1), makers=(0, 2), split=3),
        r"rows \[1\] are read before any layer has made",
    ),
    "nobody": (
        lambda: KVPlan(rows=(0, 1), makers=(0,), split=2),
        r"rows \[1\] are read before any layer has made",
    ),
    "unpublished": (
        lambda: KVPlan.from_rows([0, 1, 2, 0], split=2).split_and_share,
        "only plans of KVPlan.standard",
    ),
    "merged": (lambda: KVPlan.merge_all(3).split_and_share, "have no num_key_value_layers"),
}


@pytest.mark.parametrize("make, message", BAD.values(), ids=BAD)
def test_bad_plans_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()
