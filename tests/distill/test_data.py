"""The order of samples: each once an epoch, the same however many processes read them and wherever a run
resumes."""

import json

import jax
import numpy as np
import pytest
import tokenizers
from samples_made import config, pieces_of, same, take, texts, tokenizer, write

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.distill.data.loader import DataLoader
from swiftkv_jax.text.tokenizer import Tokenizer


@pytest.mark.parametrize("count, batch_size", [(37, 4), (8, 4), (3, 8), (1, 2)])
@pytest.mark.parametrize("long_documents", ["split", "fill"])
def test_each_epoch_has_every_sample_once(tmp_path, count, batch_size, long_documents):
    """Lanes are a few rows apart, so each lane's samples are put together first; epochs come of them."""
    rows = texts(count)
    settings = config(write(tmp_path, rows), batch_size=batch_size, long_documents=long_documents, seed=5)
    loader = DataLoader(settings, tokenizer())
    want = {row["id"]: [*tokenizer().encode(row["text"]), tokenizer().eos_ids[0]] for row in rows}
    lanes: list[list] = [[] for _ in range(batch_size)]
    while loader.epoch < 3:
        batch, ids = next(loader)
        got = iter(pieces_of(batch, ids))
        for lane, names in enumerate(ids):
            lanes[lane] += [next(got) for _ in names]
    whole: list[list[str]] = []  # by lane: the samples, put together from their pieces
    for pieces in lanes:
        whole.append([])
        tokens: list[int] = []
        for name, piece in pieces:
            tokens += piece[bool(tokens) :]  # a later piece begins with a BOS of its own
            assert tokens == want[name][: len(tokens)]
            if len(tokens) == len(want[name]):
                whole[-1].append(name)
                tokens = []
    orders = []
    for epoch in range(3):
        numbers = range(epoch * count, (epoch + 1) * count)
        orders.append([whole[n % batch_size][n // batch_size] for n in numbers])
        assert sorted(orders[-1]) == sorted(want)
    if count > 8:
        assert orders[0] != orders[1] != orders[2] and orders[0] != sorted(orders[0])
    loader.close()


def test_the_order_depends_only_on_the_seed(tmp_path):
    source = write(tmp_path, texts(40))
    runs = []
    for seed in (1, 1, 2, 2**64 - 1):
        runs.append([ids for _, ids in take(DataLoader(config(source, seed=seed), tokenizer()), 10)])
    assert runs[0] == runs[1] != runs[2] != runs[3]


def test_the_sample_order_equals_a_recorded_one(tmp_path):
    """A change of this order breaks the resumption of every run there is."""
    rows = [{"id": f"d{i}", "text": "x"} for i in range(8)]
    loader = DataLoader(config(write(tmp_path, rows), batch_size=1, seq_len=24, seed=1), tokenizer())
    names = [name for _, ids in take(loader, 2) for name in ids[0]]
    raw = np.random.Philox(key=[1, 0]).random_raw(8).tolist()
    assert names[:8] == [f"d{i}" for i in sorted(range(8), key=raw.__getitem__)]


@pytest.mark.parametrize(
    "fields, processes", [({"fuse_positions": 0.5}, 2), ({"pack": False}, 4), ({"long_documents": "fill"}, 4)]
)
def test_batches_do_not_depend_on_the_number_of_processes(tmp_path, fields, processes):
    settings = config(write(tmp_path, texts(30)), batch_size=8, **fields)
    whole = take(DataLoader(settings, tokenizer()), 12)
    parts = [take(DataLoader(settings, tokenizer(), p, processes), 12) for p in range(processes)]
    for step, (batch, ids) in enumerate(whole):
        shares = [part[step] for part in parts]
        assert same(batch, jax.tree.map(lambda *rows: np.concatenate(rows), *[b for b, _ in shares]))
        assert ids == [row for _, rows in shares for row in rows]


def test_a_process_tokenises_only_the_samples_of_its_lanes(tmp_path, monkeypatch):
    rows = [{"id": f"d{i}", "text": f"{i:015}"} for i in range(40)]  # one a row: no lane is ahead
    read, encode = set(), Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, *a, **k: read.add(text) or encode(self, text, *a, **k)
    )
    loader = DataLoader(
        config(write(tmp_path, rows), batch_size=8, seq_len=17), tokenizer(), 1, 4, prefetch=0
    )
    take(loader, 5)
    read &= {row["text"] for row in rows}  # another test's loader may still be at work in its thread
    assert 0 < len(read) <= 5 * 2 + 1  # 5 steps of 2 lanes, and the first look for a usable sample


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize(
    "fields",
    [{}, {"fuse_positions": 0.5, "long_documents": "fill", "piece_lengths": (5, 16)}, {"pack": False}],
)
def test_resume_after_any_batch_is_exact(tmp_path, prefetch, fields):
    settings = config(write(tmp_path, texts(13)), **fields)
    loader = DataLoader(settings, tokenizer(), prefetch=prefetch)
    states, batches = [], []
    for _ in range(15):
        states.append(json.dumps(loader.state()))
        batches.append(next(loader))
    for step, state in enumerate(states):
        again = DataLoader(settings, tokenizer(), prefetch=prefetch)
        take(again, step % 3)  # whatever it did before is forgotten, what it prefetched too
        again.restore(json.loads(state))
        for batch, ids in batches[step : step + 4]:
            got, names = next(again)
            assert same(got, batch) and names == ids
        assert again.state()["step"] == min(step + 4, 15)
        again.close()
    assert json.loads(states[-1])["step"] == 14


def test_resume_with_another_number_of_processes(tmp_path):
    settings = config(write(tmp_path, texts(13)), batch_size=4)
    pair = [DataLoader(settings, tokenizer(), p, 2) for p in range(2)]
    for loader in pair:
        take(loader, 5)
    states = [loader.state() for loader in pair]
    merged = states[0] | {"lanes": states[0]["lanes"] | states[1]["lanes"]}
    alone = DataLoader(settings, tokenizer())
    want = take(alone, 7)[5:]
    alone.restore(merged)
    assert all(same(a, b) and i == j for (a, i), (b, j) in zip(take(alone, 2), want, strict=True))
    with pytest.raises(UsageError, match="lanes"):
        alone.restore(states[0])


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"pack": False},
        {"limit": 5},
        {"split": "train"},
        {"piece_lengths": (8, 16)},
    ],
)
def test_a_state_of_another_config_is_refused_by_name(tmp_path, change):
    source = write(tmp_path, texts(30))
    state = DataLoader(config(source), tokenizer()).state()
    name = next(iter(change))
    with pytest.raises(UsageError, match=f"the data differs .*{name} "):
        DataLoader(config(source, **change), tokenizer()).restore(state)


def test_a_state_of_other_documents_or_none_at_all_is_refused(tmp_path):
    state = DataLoader(config(write(tmp_path, texts(30))), tokenizer()).state()
    moved = DataLoader(config(write(tmp_path, texts(30), "moved.jsonl")), tokenizer())
    moved.restore(state)  # where they lie does not matter
    changed = [*texts(29), {"id": "d29", "text": "other"}]
    with pytest.raises(UsageError, match="documents"):
        DataLoader(config(write(tmp_path, changed)), tokenizer()).restore(state)
    older = {name: value for name, value in state["config"].items() if name != "pieces_begin_with_bos"}
    with pytest.raises(UsageError, match="pieces_begin_with_bos None -> True"):
        moved.restore(state | {"config": older})  # its rows were cut elsewhere
    for nonsense in ({}, {"step": 1}, {**state, "lanes": {"0": [1]}}):
        with pytest.raises(UsageError):
            moved.restore(nonsense)


def test_a_tokenizer_may_change_between_a_state_and_its_resumption_as_long_as_it_gives_the_same_ids(tmp_path):
    settings = config(write(tmp_path, texts(30)))
    state, other = DataLoader(settings, tokenizer()).state(), tokenizer.__wrapped__()
    other.rust.decoder = tokenizers.decoders.Fuse()
    assert other.fingerprint != tokenizer().fingerprint
    DataLoader(settings, other).restore(state)
    other.rust.normalizer = tokenizers.normalizers.Prepend("x")
    with pytest.raises(UsageError, match="ids '"):
        DataLoader(settings, other).restore(state)


def test_fuse_positions_applies_to_its_share_of_rows(tmp_path):
    settings = config(write(tmp_path, texts(60, longest=8)), batch_size=8, seq_len=64, fuse_positions=0.3)
    batches = take(DataLoader(settings, tokenizer()), 60)
    fused = np.array([[row.max() == 1 for row in batch.segments] for batch, _ in batches])
    assert 0.2 < fused.mean() < 0.4
    assert len({tuple(row) for row in fused.tolist()}) > 10  # drawn for each row of each step


def test_steps_per_epoch(tmp_path):
    for count, fields in ((50, {}), (50, {"pack": False}), (3, {"batch_size": 8})):
        loader = DataLoader(config(write(tmp_path, texts(count)), **fields), tokenizer())
        want = loader.steps_per_epoch()
        take(loader, 100)
        epochs = sum(cursor for cursor, _ in loader.state()["lanes"].values()) / count
        assert abs(100 / epochs - want) <= max(1, 0.1 * want)


def test_an_error_in_the_thread_reaches_the_caller(tmp_path):
    rows = [{"id": "chat", "messages": [{"role": "user", "content": "x"}]}, {"id": "plain", "text": "x"}]
    loader = DataLoader(config(write(tmp_path, rows), mask="assistant", seq_len=64), tokenizer())
    with pytest.raises(UsageError):
        take(loader, 3)
    loader.close()
