"""Check the demo's teacher: its held-out loss and an interpolated bigram model's, in bits per byte, and by
position in its context.

python demo/check_teacher.py [demo/teacher]
"""

import itertools
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from demo.bigram import held_out_nats  # noqa: E402
from swiftkv_jax.checkpoint.hf import from_pretrained  # noqa: E402
from swiftkv_jax.core.ends import head  # noqa: E402
from swiftkv_jax.core.layers import norm  # noqa: E402
from swiftkv_jax.core.scan import forward  # noqa: E402
from swiftkv_jax.distill import loss as losses  # noqa: E402
from swiftkv_jax.distill.data.loader import DataConfig, evaluation_batches  # noqa: E402
from swiftkv_jax.distill.data.sources import open_documents, split_of  # noqa: E402
from swiftkv_jax.text.tokenizer import load_tokenizer  # noqa: E402

CORPUS = (str(ROOT / "demo" / "corpus.jsonl.xz"),)
CONTEXT = 2048
EDGES = (0, 128, 256, 512, 1024, 1536, CONTEXT)


def documents(tokenizer) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """(other, held-out) documents as tokens, bos first and eos last, and the held-out text's bytes."""
    found = {False: [], True: []}
    size = 0
    for document in open_documents(CORPUS, False):
        out = split_of(document.id) == "held_out"
        size += len(document.text.encode()) * out
        found[out].append(np.array([*tokenizer.encode(document.text), tokenizer.eos_ids[0]]))
    return found[False], found[True], size


def nats_by_position(folder: str | Path, limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(sums of nats, predicted tokens) [2048] by position in the context, of the held-out documents in rows
    of 2048 tokens; at most `limit` batches of two rows."""
    model, params = from_pretrained(folder, dtype="float32")
    config = DataConfig(sources=CORPUS, split="held_out", seq_len=CONTEXT, batch_size=2)

    @jax.jit
    def nats(batch):
        x = forward(model, params, batch.tokens, batch.positions, batch.segments)
        h = norm(model.config, params, x)
        return losses.cross_entropy(head(model.config, params, h), batch.targets)

    sums, counts = np.zeros(CONTEXT), np.zeros(CONTEXT)
    for batch in evaluation_batches(config, load_tokenizer(folder), limit):
        np.add.at(sums, batch.positions, np.asarray(nats(batch), np.float64) * batch.mask)
        np.add.at(counts, batch.positions, batch.mask)
    return sums, counts


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else ROOT / "demo" / "teacher"
    tokenizer = load_tokenizer(folder)
    train, test, size = documents(tokenizer)
    sums, counts = nats_by_position(folder)
    nats, count = sums.sum() / counts.sum(), int(counts.sum())
    floor = held_out_nats(train, test, tokenizer.vocab_size)
    predicted = sum(len(document) - 1 for document in test)
    bits = predicted / size / math.log(2)
    print(f"held out: {len(test)} pieces, {predicted:,} predicted tokens, {size:,} bytes")
    print(f"interpolated bigram  {floor:.4f} nats per token  {floor * bits:.4f} bits per byte")
    print(f"teacher              {nats:.4f} nats per token  {nats * bits:.4f} bits per byte")
    print(f"the teacher is {floor - nats:.4f} nats per token better ({count:,} predicted in rows of 2048)")
    print("the teacher by position in its context:")
    for begin, end in itertools.pairwise(EDGES):
        part = slice(begin, end)
        print(f"  {begin:4d} to {end:4d}  {sums[part].sum() / counts[part].sum():.4f} nats per token")


if __name__ == "__main__":
    main()
