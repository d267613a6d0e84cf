"""Documents of many lengths, a tokenizer, and the laws of every batch that is made of them."""

import functools
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
from tokenizers_made import CHATML, make_tokenizer

from swiftkv_jax.distill.data.loader import DataConfig, DataLoader
from swiftkv_jax.text.tokenizer import Tokenizer, load_tokenizer


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
