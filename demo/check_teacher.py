"""Is the demo's teacher a model? Its held-out loss beside an interpolated bigram model's, and in bits per
byte.

python demo/check_teacher.py [demo/teacher]
"""

import math
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from swiftkv_jax.analysis.bigram import held_out_nats  # noqa: E402
from swiftkv_jax.checkpoint.hf import from_pretrained  # noqa: E402
from swiftkv_jax.distill import loss as losses  # noqa: E402
from swiftkv_jax.distill.data import DataConfig, evaluation_batches  # noqa: E402
from swiftkv_jax.distill.sources import open_documents, split_of  # noqa: E402
from swiftkv_jax.kernels.dense import rms_norm  # noqa: E402
from swiftkv_jax.model import forward, head  # noqa: E402
from swiftkv_jax.tokenizer import load_tokenizer  # noqa: E402

CORPUS = (str(ROOT / "demo" / "corpus.jsonl.xz"),)


def documents(tokenizer) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """(other, held-out) documents as tokens, bos first and eos last, and the held-out text's bytes."""
    found = {False: [], True: []}
    size = 0
    for document in open_documents(CORPUS, False):
        out = split_of(document.id) == "held_out"
        size += len(document.text.encode()) * out
        found[out].append(np.array([*tokenizer.encode(document.text), tokenizer.eos_ids[0]]))
    return found[False], found[True], size


def model_nats(folder: str | Path, limit: int | None = None) -> tuple[float, int]:
    """(mean nats per predicted token, predicted tokens) of the held-out documents, in rows of 2048 tokens."""
    model, params = from_pretrained(folder, dtype="float32")
    config = DataConfig(sources=CORPUS, split="held_out", seq_len=2048, batch_size=2)

    @jax.jit
    def total(batch):
        x = forward(model, params, batch.tokens, batch.positions, batch.segments)
        h = rms_norm(x, params["norm"], model.config.rms_norm_eps)
        return losses.cross_entropy_sum(
            partial(head, params), h, batch.targets, batch.mask, 512
        ), batch.mask.sum()

    sums = [total(batch) for batch in evaluation_batches(config, load_tokenizer(folder), limit)]
    nats, count = (float(sum(np.asarray(s[i], np.float64) for s in sums)) for i in (0, 1))
    return nats / count, int(count)


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else ROOT / "demo" / "teacher"
    tokenizer = load_tokenizer(folder)
    train, test, size = documents(tokenizer)
    nats, count = model_nats(folder)
    floor = held_out_nats(train, test, tokenizer.vocab_size)
    predicted = sum(len(document) - 1 for document in test)
    bits = predicted / size / math.log(2)
    print(f"held out: {len(test)} pieces, {predicted:,} predicted tokens, {size:,} bytes")
    print(f"interpolated bigram  {floor:.4f} nats per token  {floor * bits:.4f} bits per byte")
    print(f"teacher              {nats:.4f} nats per token  {nats * bits:.4f} bits per byte")
    print(f"the teacher is {floor - nats:.4f} nats per token better ({count:,} predicted in rows of 2048)")


if __name__ == "__main__":
    main()
