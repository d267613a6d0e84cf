"""Laws of packing: rows hold every token once and in order, whatever their pieces' lengths."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from samples_made import config, pieces_of, take, tokenizer, write

from swiftkv_jax.distill.data.loader import DataLoader, evaluation_batches
from swiftkv_jax.distill.data.packing import Place, Sample, assemble, fill_row


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


@given(streams(), st.integers(2, 9), st.booleans(), st.booleans(), st.integers(2, 9))
def test_rows_hold_every_token_once_in_order_and_the_mask_is_of_targets(
    samples, seq_len, pack, cut_anywhere, longest
):
    rows, place, longest = [], Place(), min(longest, seq_len)
    while place.cursor < len(samples):
        pieces, place = fill_row(
            lambda i: samples[i] if i < len(samples) else None,
            place,
            seq_len,
            pack=pack,
            cut_anywhere=cut_anywhere,
            longest=longest,
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
        assert all(cut[name] == -(-length // longest) for name, length in lengths.items())
    assert all(cut[name] <= 1 for name, length in lengths.items() if length <= longest)  # whole samples
    assert all(len(piece) <= longest for row in rows for piece in row)
    if not pack:
        assert all(len(row) <= 1 for row in rows)
    elif cut_anywhere and all(length > longest for length in lengths.values()):
        assert (batch.segments[:-1] > 0).all()  # no padding before the last row


@given(streams(), st.integers(2, 9), st.booleans(), st.booleans())
def test_every_piece_begins_as_its_text_does(samples, seq_len, pack, cut_anywhere):
    """With BOS, where texts do. The token after a BOS in the middle of a text is no target; nothing else is
    lost."""
    bos = 999
    texts = [
        Sample(s.id, np.insert(s.tokens, 0, bos), np.insert(s.learn, 0, True), bos) for s in samples if len(s)
    ]
    rows, place = [], Place()
    while place.cursor < len(texts):
        pieces, place = fill_row(
            lambda i: texts[i] if i < len(texts) else None,
            place,
            seq_len,
            pack=pack,
            cut_anywhere=cut_anywhere,
        )
        rows.append(pieces)
        assert sum(map(len, pieces)) <= seq_len
    batch = assemble(rows, [False] * len(rows), seq_len)
    pieces = pieces_of(batch, [[p.id for p in row] for row in rows])
    assert all(tokens[0] == bos and bos not in tokens[1:] for _, tokens in pieces)
    assert [t for _, tokens in pieces for t in tokens[1:]] == [t for s in samples for t in s.tokens.tolist()]
    known = {t: learn for s in samples for t, learn in zip(s.tokens.tolist(), s.learn, strict=True)}
    seen, wanted = set(), []
    for name, tokens in pieces:
        wanted += [t for t in tokens[1 if name not in seen else 2 :] if known[t]]
        seen.add(name)
    assert batch.targets[batch.mask > 0].tolist() == wanted


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


def test_rows_take_their_piece_lengths_in_turn_and_each_length_gets_its_share(tmp_path):
    """Long documents are cut wherever a row ends; a lane has another length in the next step."""
    rows = [{"id": f"d{i}", "text": "x" * 500} for i in range(6)]
    settings = config(
        write(tmp_path, rows), seq_len=32, batch_size=2, piece_lengths=(8, 32), long_documents="fill"
    )
    got = take(DataLoader(settings, tokenizer()), 6)
    for step, (batch, ids) in enumerate(got):
        pieces = [len(tokens) for _, tokens in pieces_of(batch, ids)]
        for lane, lengths in enumerate((pieces[: len(ids[0])], pieces[len(ids[0]) :])):
            longest = settings.piece_lengths[(step + lane) % 2]
            assert sum(lengths) == 32 and max(lengths) <= longest
            assert lengths.count(longest) >= 32 // longest - 1  # a document may end inside the row


def test_held_out_pieces_are_those_of_short_rows_whatever_the_row(tmp_path):
    """Evaluating pieces of 16 tokens in rows of 48 scores the same predictions as rows of 16."""
    rows = [{"id": f"d{i}", "text": "x" * n} for i, n in enumerate((70, 3, 15, 33, 1, 16))]
    source = write(tmp_path, rows)
    short = evaluation_batches(config(source, batch_size=1), tokenizer())
    long = evaluation_batches(config(source, seq_len=48, batch_size=2, piece_lengths=(16,)), tokenizer())

    def predictions(batches) -> Counter:
        return Counter(
            (tuple(tokens[segments == n].tolist()), mask[segments == n].sum())
            for b in batches
            for tokens, segments, mask in zip(b.tokens, b.segments, b.mask, strict=True)
            for n in range(1, segments.max() + 1)
        )

    assert predictions(long) == predictions(short) and predictions(short).total() == 14
    assert {b.tokens.shape for b in long} == {(2, 48)}
