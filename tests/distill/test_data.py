"""Laws of packing and of the order of samples: nothing lost, nothing mixed, the same however it is run."""

import functools
import itertools
import json
import tempfile
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_made import CHATML, END, make_tokenizer

from swiftkv_jax.distill.data import DataConfig, DataLoader, evaluation_batches, merge_states, split_of
from swiftkv_jax.distill.packing import Place, Sample, assemble, fill_row
from swiftkv_jax.errors import UsageError
from swiftkv_jax.tokenizer import Tokenizer, load_tokenizer

DEMO = Path(__file__).parent.parent.parent / "demo"


@functools.cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(make_tokenizer(Path(folder), CHATML))


def write(folder: Path, rows: list[dict], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(count: int, longest: int = 50) -> list[dict]:
    """Documents of many lengths, each of bytes that tell it from the others."""
    return [{"id": f"d{i}", "text": f"<{i}>" + "zq"[i % 2] * (i * 7 % longest)} for i in range(count)]


def config(source: str, **fields) -> DataConfig:
    return DataConfig(**{"sources": (source,), "seq_len": 16, "batch_size": 4} | fields)


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def take(loader: DataLoader, count: int) -> list:
    return [next(loader) for _ in range(count)]


def pieces_of(batch, ids) -> list[tuple[str, list[int]]]:
    """(sample, tokens) of each segment, row by row; checks the laws that hold inside every unfused batch."""
    out = []
    for row, names in enumerate(ids):
        tokens, targets = batch.tokens[row], batch.targets[row]
        segments, positions = batch.segments[row], batch.positions[row]
        used = int((segments > 0).sum())
        assert (segments[used:] == 0).all() and (batch.mask[row, used:] == 0).all()
        assert (tokens[used:] == 0).all() and (targets[used:] == 0).all() and (positions[used:] == 0).all()
        assert sorted(set(segments[:used].tolist())) == list(range(1, len(names) + 1))
        assert (np.diff(segments[:used]) >= 0).all()
        for number, name in enumerate(names, 1):
            (at,) = np.nonzero(segments == number)
            assert positions[at].tolist() == list(range(len(at)))
            assert targets[at].tolist() == [*tokens[at[1:]].tolist(), 0]
            assert batch.mask[row, at[-1]] == 0  # the next segment's first token is nobody's target
            out.append((name, tokens[at].tolist()))
    return out


@st.composite
def streams(draw):
    lengths = draw(st.lists(st.integers(0, 25), min_size=1, max_size=12))
    learn = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    samples, start = [], 0
    for i, length in enumerate(lengths):
        span = slice(start, start + length)
        samples.append(
            Sample(f"s{i}", np.arange(span.start, span.stop, dtype=np.int32) + 1, np.array(learn[span], bool))
        )
        start = span.stop
    return samples


@given(streams(), st.integers(2, 9), st.booleans(), st.booleans())
def test_rows_hold_every_token_once_in_order_and_the_mask_is_of_targets(samples, seq_len, pack, cut_anywhere):
    rows, place = [], Place()
    while place.cursor < len(samples):
        pieces, place = fill_row(
            lambda i: samples[i] if i < len(samples) else None,
            place,
            seq_len,
            pack=pack,
            cut_anywhere=cut_anywhere,
        )
        rows.append(pieces)
    batch = assemble(rows, [False] * len(rows), seq_len)
    pieces = pieces_of(batch, [[p.id for p in row] for row in rows])
    assert [t for _, tokens in pieces for t in tokens] == [t for s in samples for t in s.tokens.tolist()]
    learn = {t: bool(x) for s in samples for t, x in zip(s.tokens.tolist(), s.learn, strict=True)}
    targets = batch.targets > 0
    assert batch.mask[targets].tolist() == [float(learn[t]) for t in batch.targets[targets].tolist()]
    assert not batch.mask[~targets].any()
    lengths = {s.id: len(s) for s in samples}
    cut = Counter(name for name, _ in pieces)
    if not cut_anywhere:
        assert all(cut[name] == -(-length // seq_len) for name, length in lengths.items())
    assert all(cut[name] <= 1 for name, length in lengths.items() if length <= seq_len)  # whole samples
    if not pack:
        assert all(len(row) <= 1 for row in rows)
    elif cut_anywhere and all(length > seq_len for length in lengths.values()):
        assert (batch.segments[:-1] > 0).all()  # no padding before the last row


@given(streams(), st.integers(2, 9))
def test_next_fit_leaves_no_room_for_the_next_piece(samples, seq_len):
    samples = [s for s in samples if len(s)]
    rows, place = [], Place()
    while place.cursor < len(samples):
        pieces, place = fill_row(
            lambda i: samples[i] if i < len(samples) else None, place, seq_len, pack=True, cut_anywhere=False
        )
        rows.append(pieces)
    for row, following in itertools.pairwise(rows):
        assert sum(map(len, row)) + len(following[0]) > seq_len


def test_fused_rows_are_one_segment_with_running_positions():
    samples = [Sample(f"s{n}", np.full(n, n, np.int32), np.ones(n, bool)) for n in (2, 3)]
    batch = assemble([samples, samples], [True, False], 6)
    assert batch.segments.tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 2, 2, 2, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 0, 1, 2, 0]]
    assert batch.targets.tolist() == [[2, 3, 3, 3, 0, 0], [2, 0, 3, 3, 0, 0]]
    assert batch.mask.tolist() == [[1, 0, 1, 1, 0, 0]] * 2


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
            tokens += piece
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


def test_order_follows_the_seed_and_nothing_else(tmp_path):
    source = write(tmp_path, texts(40))
    runs = []
    for seed in (1, 1, 2, 2**64 - 1):
        runs.append([ids for _, ids in take(DataLoader(config(source, seed=seed), tokenizer()), 10)])
    assert runs[0] == runs[1] != runs[2] != runs[3]


def test_permutation_is_pinned(tmp_path):
    """A change of this order breaks the resumption of every run there is."""
    rows = [{"id": f"d{i}", "text": "x"} for i in range(8)]
    loader = DataLoader(config(write(tmp_path, rows), batch_size=1, seq_len=24, seed=1), tokenizer())
    names = [name for _, ids in take(loader, 2) for name in ids[0]]
    raw = np.random.Philox(key=[1, 0]).random_raw(8).tolist()
    assert names[:8] == [f"d{i}" for i in sorted(range(8), key=raw.__getitem__)]


@pytest.mark.parametrize("fields", [{}, {"fuse_positions": 0.5}, {"pack": False}, {"long_documents": "fill"}])
@pytest.mark.parametrize("processes", [2, 4])
def test_batches_do_not_depend_on_the_number_of_processes(tmp_path, fields, processes):
    settings = config(write(tmp_path, texts(30)), batch_size=8, **fields)
    whole = take(DataLoader(settings, tokenizer()), 12)
    parts = [take(DataLoader(settings, tokenizer(), p, processes), 12) for p in range(processes)]
    for step, (batch, ids) in enumerate(whole):
        shares = [part[step] for part in parts]
        assert same(batch, jax.tree.map(lambda *rows: np.concatenate(rows), *[b for b, _ in shares]))
        assert ids == [row for _, rows in shares for row in rows]


def test_a_process_tokenises_only_the_samples_of_its_lanes(tmp_path):
    rows = [{"id": f"d{i}", "text": "x" * 15} for i in range(40)]  # one a row: no lane is ahead
    loader = DataLoader(
        config(write(tmp_path, rows), batch_size=8, seq_len=17), tokenizer(), 1, 4, prefetch=0
    )
    take(loader, 5)
    assert (
        len(loader.samples._cache) <= 5 * 2 + 1
    )  # 5 steps of 2 lanes, and the first look for a usable sample


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("fields", [{}, {"fuse_positions": 0.5, "long_documents": "fill"}, {"pack": False}])
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
    merged = merge_states([loader.state() for loader in pair])
    alone = DataLoader(settings, tokenizer())
    want = take(alone, 7)[5:]
    alone.restore(merged)
    assert all(same(a, b) and i == j for (a, i), (b, j) in zip(take(alone, 2), want, strict=True))
    with pytest.raises(UsageError, match=r"lacks lanes \[2, 3\]: merge"):
        alone.restore(pair[0].state())


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"batch_size": 8}, {"seq_len": 17}, {"pack": False}, {"limit": 5}, {"split": "train"}],
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
    with pytest.raises(UsageError, match="documents '"):
        DataLoader(config(write(tmp_path, changed)), tokenizer()).restore(state)
    for nonsense in ({}, {"step": 1}, {**state, "lanes": {"0": [1]}}):
        with pytest.raises(UsageError, match="no state of a data loader"):
            moved.restore(nonsense)


def test_held_out_documents_are_never_trained_on_and_all_evaluated_once(tmp_path):
    rows = [{"id": f"doc{i // 3}#{i % 3}", "text": f"{i}:" + "y" * (i % 40)} for i in range(300)]
    source = write(tmp_path, rows)
    splits = {row["id"]: split_of(row["id"]) for row in rows}
    kept_out = [name for name, split in splits.items() if split == "held_out"]
    assert 0 < len(kept_out) < 60 and "tuning" in splits.values()
    loader = DataLoader(config(source, split="train"), tokenizer())
    seen = set()
    while loader.epoch < 1:
        seen.update(name for row in next(loader)[1] for name in row)
    assert seen == {name for name, split in splits.items() if split == "train"}

    batches = evaluation_batches(config(source, split="held_out"), tokenizer())
    eos = tokenizer().eos_ids[0]
    want = [[*tokenizer().encode(row["text"]), eos] for row in rows if row["id"] in kept_out]
    got = [t for b in batches for t in b.tokens[b.segments > 0].tolist()]
    assert got == [t for tokens in want for t in tokens]
    assert all(b.tokens.shape == (4, 16) for b in batches)
    assert same(batches, evaluation_batches(config(source, split="held_out"), tokenizer()))
    assert same(batches[:2], evaluation_batches(config(source, split="held_out"), tokenizer(), 2))
    halves = [evaluation_batches(config(source, split="held_out"), tokenizer(), None, p, 2) for p in range(2)]
    for batch, *parts in zip(batches, *halves, strict=True):
        assert same(batch, jax.tree.map(lambda *x: np.concatenate(x), *parts))


def test_documents_without_ids_are_held_out_by_their_text(tmp_path):
    rows = [{"text": f"document {i}"} for i in range(120)]
    names = []
    for split in ("train", "held_out", "tuning", "all"):
        loader = DataLoader(config(write(tmp_path, rows), split=split, seq_len=64), tokenizer())
        found: set[str] = set()
        while loader.epoch < 1:
            found.update(name for row in next(loader)[1] for name in row)
        names.append(found)
    assert names[0] | names[1] | names[2] == names[3] and all(names)
    assert sum(map(len, names[:3])) == len(names[3])
    assert all(split_of(name) == "held_out" for name in names[1])


@pytest.mark.parametrize(
    "policy, kept", [("split", [20, 5, 18, 1]), ("drop", [5]), ("truncate", [16, 5, 16, 1])]
)
def test_samples_longer_than_a_row(tmp_path, policy, kept):
    rows = [{"id": f"d{i}", "text": "x" * (n - 2)} for i, n in enumerate((20, 5, 18))] + [
        {"id": "e", "text": ""}
    ]
    settings = config(write(tmp_path, rows), long_documents=policy, batch_size=1)
    (*batches,) = evaluation_batches(settings, tokenizer())
    assert sum(int((b.segments > 0).sum()) for b in batches) == sum(kept) - (1 if kept[-1] == 1 else 0)


def test_limit_takes_the_first_samples(tmp_path):
    loader = DataLoader(config(write(tmp_path, texts(30)), limit=3), tokenizer())
    assert {name for _, ids in take(loader, 20) for row in ids for name in row} == {"d0", "d1", "d2"}


def test_assistant_mask_counts_the_predictions_of_assistant_tokens(tmp_path):
    chat = [
        {"role": r, "content": c}
        for r, c in (("user", "cat"), ("assistant", "cat"), ("user", "cat"), ("assistant", "cat"))
    ]
    (batch,) = evaluation_batches(
        config(write(tmp_path, [{"messages": chat}]), seq_len=256, batch_size=1, mask="assistant"),
        tokenizer(),
    )
    counted = batch.targets[batch.mask > 0].tolist()
    assert tokenizer().decode(counted, skip_special_tokens=False) == f"cat{END}cat{END}"
    before = batch.tokens[batch.mask > 0].tolist()  # each is predicted from the token before it
    assert tokenizer().decode(before, skip_special_tokens=False) == "\ncat\ncat"
    (everything,) = evaluation_batches(
        config(write(tmp_path, [{"messages": chat}]), seq_len=256, batch_size=1), tokenizer()
    )
    assert np.array_equal(everything.tokens, batch.tokens)
    assert everything.mask.sum() == (batch.segments > 0).sum() - 1
    assert tokenizer().eos_ids[0] not in everything.tokens  # a chat ends as its template does


def test_text_gets_one_eos(tmp_path):
    rows = [{"text": "one"}, {"text": "two<|eos|>"}]
    for append in (True, False):
        settings = config(write(tmp_path, rows), batch_size=1, seq_len=32, append_eos=append)
        (batch,) = evaluation_batches(settings, tokenizer())
        assert (batch.tokens == tokenizer().eos_ids[0]).sum() == 1 + append


def test_fused_share(tmp_path):
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
    with pytest.raises(UsageError, match='mask="assistant" needs chats, and document plain is a text'):
        take(loader, 3)
    loader.close()


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"sources": ()}, "sources is a tuple of at least one"),
        ({"split": "heldout"}, "data.split must be one of .*did you mean 'held_out'"),
        ({"mask": "user"}, "data.mask must be one of all, assistant, not 'user'"),
        ({"long_documents": "cut"}, "data.long_documents must be one of"),
        ({"seq_len": 1}, "seq_len must be at least 2"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"seed": -1}, "seed must be in"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"fuse_positions": 1.5}, "fuse_positions is a probability"),
        ({"fuse_positions": 0.1, "pack": False}, "fuse_positions needs data.pack=True"),
    ],
)
def test_configs_that_make_no_sense(fields, expected):
    values = {"sources": ("x.jsonl",), "seq_len": 8, "batch_size": 2} | fields
    with pytest.raises(UsageError, match=expected):
        DataConfig(**values)


def test_data_that_cannot_be_used(tmp_path):
    source = write(tmp_path, [{"id": "library/json.rst.txt", "text": "x" * 100}])
    with pytest.raises(UsageError, match=r'split "held_out" of .* is empty: of 1 documents'):
        DataLoader(config(source, split="held_out"), tokenizer())
    with pytest.raises(UsageError, match=r"every sample of .* is longer than data.seq_len 16"):
        DataLoader(config(source, long_documents="drop"), tokenizer())
    with pytest.raises(UsageError, match=r"every sample of .* is empty"):
        DataLoader(config(write(tmp_path, [{"text": ""}])), tokenizer())
    with pytest.raises(UsageError, match="batch_size 4 is not a multiple of the 3 processes"):
        DataLoader(config(source), tokenizer(), 0, 3)
    with pytest.raises(UsageError, match="batch_size 4 is not a multiple of the 3 processes"):
        evaluation_batches(config(source), tokenizer(), None, 0, 3)


def test_the_demo_corpus_splits_by_source_file():
    settings = DataConfig(
        sources=(str(DEMO / "corpus.jsonl.xz"),), seq_len=256, batch_size=2, split="held_out"
    )
    loader = DataLoader(settings, load_tokenizer(DEMO / "tokenizer"))
    documents = [loader.samples.documents[i].id for i in loader.samples.indices]
    others = {d.id.split("#")[0] for d in loader.samples.documents} - {d.split("#")[0] for d in documents}
    assert len(documents) > 5
    assert {split_of(d) for d in documents} == {"held_out"}
    assert {split_of(d) for d in others} == {"train", "tuning"}
