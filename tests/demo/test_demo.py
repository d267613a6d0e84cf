"""The embedded demo's assets: a teacher that transformers loads, better than a bigram model; no leaks."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.distill.data.sources import open_documents, split_of
from swiftkv_jax.text.tokenizer import load_tokenizer

DEMO = Path(__file__).resolve().parents[2] / "demo"
sys.path.insert(0, str(DEMO))


@pytest.fixture(scope="module")
def check():
    import check_teacher

    return check_teacher


def test_transformers_loads_the_teacher_and_gives_the_same_logits():
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(DEMO / "teacher", dtype=torch.float32).eval()
    text = "The module provides a class which, if the file does not exist, raises an error.\n"
    ids = AutoTokenizer.from_pretrained(DEMO / "teacher")(text)["input_ids"]
    assert ids == load_tokenizer(DEMO / "teacher").encode(text) and 15 < len(ids) < 40
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0].numpy()
    model, params = skv.from_pretrained(DEMO / "teacher", dtype="float32")
    got = np.asarray(jax.jit(model.apply)({"params": params}, jnp.asarray([ids])))[0]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    assert sum(p.numel() for p in theirs.parameters()) <= 5_000_000
    assert sum(f.stat().st_size for f in (DEMO / "teacher").iterdir()) <= 10_000_000
    assert (DEMO / "corpus.jsonl.xz").stat().st_size <= 2_000_000


@pytest.mark.slow
def test_the_teacher_beats_an_interpolated_bigram_model_by_half_a_nat(check):
    """On the first held-out rows of 2048; `demo/check_teacher.py` measures all of them."""
    from demo.bigram import held_out_nats

    tokenizer = load_tokenizer(DEMO / "teacher")
    train, test, _ = check.documents(tokenizer)
    sums, counts = check.nats_by_position(DEMO / "teacher", limit=4)
    assert counts.sum() > 14_000
    assert sums.sum() / counts.sum() < held_out_nats(train, test, tokenizer.vocab_size) - 0.5


def test_whole_documents_are_held_out():
    """The pieces of a document are all in one split."""
    splits: dict[str, set[str]] = {}
    for document in open_documents((str(DEMO / "corpus.jsonl.xz"),), False):
        splits.setdefault(document.id.split("#")[0], set()).add(split_of(document.id))
    assert all(len(split) == 1 for split in splits.values())
    out = sum(split == {"held_out"} for split in splits.values())
    assert 0.03 < out / len(splits) < 0.08
