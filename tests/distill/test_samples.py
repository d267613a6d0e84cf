"""Training and held-out splits, loss masks, and errors for data that cannot be used."""

import jax
import numpy as np
import pytest
from samples_made import config, same, tokenizer, write
from tokenizers_made import CHATML, END, make_tokenizer

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.distill.data.loader import DataConfig, DataLoader, evaluation_batches
from swiftkv_jax.distill.data.sources import split_of
from swiftkv_jax.text.tokenizer import load_tokenizer


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
    bos, eos = tokenizer().bos_id, tokenizer().eos_ids[0]
    want = [[*tokenizer().encode(row["text"])[1:], eos] for row in rows if row["id"] in kept_out]
    got = [t for b in batches for t in b.tokens[b.segments > 0].tolist() if t != bos]
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
    "policy, kept", [("split", [21, 5, 19, 1]), ("drop", [5]), ("truncate", [16, 5, 16, 1])]
)
def test_samples_longer_than_a_row(tmp_path, policy, kept):
    rows = [{"id": f"d{i}", "text": "x" * (n - 2)} for i, n in enumerate((20, 5, 18))] + [
        {"id": "e", "text": ""}
    ]
    settings = config(write(tmp_path, rows), long_documents=policy, batch_size=1)
    (*batches,) = evaluation_batches(settings, tokenizer())
    assert sum(int((b.segments > 0).sum()) for b in batches) == sum(kept) - (1 if kept[-1] == 1 else 0)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("policy", ["split", "fill"])
def test_pieces_of_a_text_begin_with_bos_if_the_tokenizer_adds_it(policy, adds, tmp_path):
    """So they do in serving. Chats that begin with the same token by their template do not count."""
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "tokenizer", CHATML, bos=adds))
    rows = [{"text": "x" * 100}, {"messages": [{"role": "user", "content": "x" * 100}]}]
    settings = config(write(tmp_path, rows), long_documents=policy, batch_size=1)
    batches = evaluation_batches(settings, tokenizer)
    firsts = [b.tokens[0, at] for b in batches for at in np.flatnonzero(b.positions[0] == 0)[:1]]
    found = sum(first == tokenizer.bos_id for first in firsts)
    assert len(firsts) > 12 and (found == len(firsts) if adds else found <= 1)


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


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"sources": ()}, "sources is a tuple of at least one"),
        ({"split": "heldout"}, "data.split must be one of .*did you mean 'held_out'"),
        ({"seq_len": 1}, "seq_len must be at least 2"),
        ({"seed": -1}, "seed must be in"),
        ({"fuse_positions": 1.5}, "fuse_positions must be in \\[0, 1\\]"),
        ({"fuse_positions": 0.1, "pack": False}, "fuse_positions needs data.pack=True"),
    ],
)
def test_configs_that_make_no_sense(fields, expected):
    values = {"sources": ("x.jsonl",), "seq_len": 8, "batch_size": 2} | fields
    with pytest.raises(UsageError, match=expected):
        DataConfig(**values)


def test_data_that_cannot_be_used(tmp_path):
    source = write(tmp_path, [{"id": "library/json.rst.txt", "text": "x" * 100}])
    with pytest.raises(UsageError, match="held_out"):
        DataLoader(config(source, split="held_out"), tokenizer())
    with pytest.raises(UsageError, match="seq_len"):
        DataLoader(config(source, long_documents="drop"), tokenizer())
    with pytest.raises(UsageError):
        DataLoader(config(write(tmp_path, [{"text": ""}])), tokenizer())
    with pytest.raises(UsageError, match="batch_size"):
        DataLoader(config(source), tokenizer(), 0, 3)
    with pytest.raises(UsageError, match="batch_size"):
        evaluation_batches(config(source), tokenizer(), None, 0, 3)
