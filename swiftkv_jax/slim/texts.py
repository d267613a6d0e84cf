"""A text in two halves: pieces to fit W_KV on, and pieces of other documents to measure on."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.folder import DEMO
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.core.cache import Encoded
from swiftkv_jax.core.shapes import Bool, Float, Int
from swiftkv_jax.distill.data.sources import open_documents
from swiftkv_jax.text.tokenizer import Tokenizer, load_tokenizer

NEEDED, MOST = 8, 16  # tokens to fit on, for each of a layer's inputs: at least, and at most
KEPT = 8192  # tokens to measure on, at most
DEFAULT = DEMO / "corpus.jsonl.xz"
PIECE, BATCH = 512, 4  # tokens of a piece at most; pieces at once


@dataclasses.dataclass(frozen=True)
class Beside:
    """An encoder's output for the source of each of n texts.

    Attributes:
      x: [n, S, D]. lengths: [n] positions that are not padding. some: [n, S] those of them to fit on or to
        measure errors on.
    """

    x: Float[np.ndarray, "n S D"]
    lengths: Int[np.ndarray, " n"]
    some: Bool[np.ndarray, "n S"]


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Texts of up to T tokens, each by itself.

    Attributes:
      tokens: [n, T], padded at the end. real: [n, T] whether a token is not padding. beside: the encoder's
        output that a decoder with an encoder also reads.
    """

    tokens: Int[np.ndarray, "n T"]
    real: Bool[np.ndarray, "n T"]
    beside: Beside | None = None

    @property
    def count(self) -> int:
        """Real tokens."""
        return int(self.real.sum())

    @property
    def encoded(self) -> Encoded | None:
        """The encoder's output for `forward`, if there is one."""
        beside = self.beside
        return None if beside is None else Encoded(jnp.asarray(beside.x), jnp.asarray(beside.lengths))

    def batches(self) -> Iterator["Pieces"]:
        """Batches of one shape; the last is filled up with its last piece, whose copies do not count."""
        for i in range(0, len(self.tokens), BATCH):
            index = np.minimum(np.arange(i, i + BATCH), len(self.tokens) - 1)
            new = (np.arange(i, i + BATCH) == index)[:, None]
            beside = self.beside
            if beside is not None:
                beside = Beside(beside.x[index], beside.lengths[index], beside.some[index] & new)
            yield Pieces(self.tokens[index], self.real[index] & new, beside)


def halves(documents: Iterable[list[int]], inputs: int, context: int, vocab: int) -> tuple[Pieces, Pieces]:
    """(to fit on, to measure on): see `apart`.

    inputs: of a layer. context: tokens of a piece, at most. vocab: of the model.
    """
    sides, wanted = apart(documents, inputs), (MOST * inputs, KEPT)
    fit, kept = (_pieces(side, most, context) for side, most in zip(sides, wanted, strict=True))
    check_enough(fit.count, kept.count, inputs)
    most = max(fit.tokens.max(), kept.tokens.max())
    if most >= vocab:
        raise UsageError(f"token id {most} is outside the model's vocabulary of {vocab}: another tokenizer?")
    return fit, kept


def apart(
    documents: Iterable[Sequence], inputs: int, size: Callable[[Sequence], int] = len
) -> tuple[list[Sequence], list[Sequence]]:
    """(to fit on, to measure on): a document goes whole to the half that has fewer tokens so far.

    A text of one document is cut in the middle. Reading stops when both halves are full.

    inputs: of a layer. size: tokens of a document.
    """
    wanted, sides = (MOST * inputs, KEPT), ([], [])
    for document in filter(None, documents):
        sizes = [sum(map(size, side)) for side in sides]
        if all(a >= b for a, b in zip(sizes, wanted, strict=True)):
            break
        sides[sizes[1] < sizes[0]].append(document)
    if not sides[1] and sides[0]:
        (whole,) = sides[0]
        sides = ([whole[: len(whole) // 2]], [whole[len(whole) // 2 :]])
    return sides


def check_enough(fit: int, kept: int, inputs: int, what: str = "the text") -> None:
    """Check that there are enough tokens to fit on and to measure on."""
    needed, beside = NEEDED * inputs, min(NEEDED * inputs, KEPT) // 2
    if fit < needed or kept < beside:
        counts = f"{fit} tokens to fit on and {kept} of other documents to measure on"
        raise UsageError(
            f"{what} is too short: {counts}; {needed} ({NEEDED} x {inputs}) and {beside} are needed"
        )


def read(text: str | None, folder: Path, config: ModelConfig) -> tuple[Pieces, Pieces]:
    """`halves` of a file of documents, or of the demo's corpus, for the model in `folder`."""
    ids = encoded(text, load_tokenizer(folder))
    return halves(ids, config.hidden_size, config.max_position_embeddings, config.vocab_size)


def _pieces(documents: Sequence[Sequence[int]], most: int, context: int) -> Pieces:
    size, left, pieces = min(PIECE, context), most, []
    for document in documents:
        for i in range(0, min(len(document), left), size):
            pieces.append(document[i : i + min(size, left)])
            left -= len(pieces[-1])
    tokens = np.zeros((len(pieces), size), np.int32)
    real = np.zeros(tokens.shape, bool)
    for i, piece in enumerate(pieces):
        tokens[i, : len(piece)], real[i, : len(piece)] = piece, True
    return Pieces(tokens, real)


def encoded(text: str | None, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The tokens of each text or chat of a file of documents, or of the demo's corpus."""
    for document in open_documents([text or str(DEFAULT)]):
        try:
            chat = list(document.messages)
            ids = tokenizer.encode_chat(chat, False) if chat else tokenizer.encode(document.text)
        except UsageError as error:
            raise UsageError(f"{document.place or document.id}: {error}") from error
        yield ids
