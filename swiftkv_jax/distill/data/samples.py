"""Samples of a data config: token ids, and which predictions count."""

import collections
import contextlib
import dataclasses
import datetime
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from typing import Annotated

import numpy as np

from swiftkv_jax.common.checks import Checked, Count, above, every, integer, number, one_of
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.distill.data.forms import Document, check_columns
from swiftkv_jax.distill.data.packing import Sample
from swiftkv_jax.distill.data.sources import Documents, open_documents, split_of
from swiftkv_jax.text.tokenizer import Tokenizer

_CACHED_TOKENS = 1 << 24  # tokenised samples kept in memory: 80 MB
_CHAT_DATE = datetime.date(2024, 7, 26)  # for templates that print one: data must not change from day to day


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Checked):
    """The training data and its shape.

    Attributes:
      sources: files, patterns, folders, or hub datasets (hf://org/name:config[split]@revision, where all
        parts but the name are optional); or self://prompts.jsonl or self://?prompts=N, chats that the model
        writes itself. docs/your_data.md lists formats.
      weights: one for each source: how often an epoch takes its samples. 2: twice; 0.5: every other one, and
        the rest in the next epoch. Empty: once. Evaluations take each document once.
      columns: names of other columns than docs/your_data.md lists, as "ours=theirs": "prompt=question".
      stream_rows: read only this many first rows of each hub dataset, over the network; None fetches all.
      seq_len: tokens per row.
      batch_size: rows per step, over all processes.
      seed: seed of the order of samples.
      pack: several whole samples per row, in separate segments; otherwise one sample per row.
      split: which documents to use: "train"; "tuning" (to choose a recipe) or "held_out" (to report), which
        "train" leaves out; or "all", if the evaluation has other data.
      mask: predictions that count in the loss: of "all" tokens, or only of the "assistant"'s in chats.
      chats: how chats are rendered: by the model's "template", or "plain", as texts with blank lines between
        the turns, for models without a template.
      append_eos: end texts with EOS; chats end as their template does.
      skip_bad_lines: skip invalid rows, and those that the chat template refuses, instead of stopping.
      limit: use only the first `limit` samples; None for all.
      long_documents: a sample longer than `seq_len` is "split" into pieces of `seq_len` and a rest, cut
        wherever a row ends ("fill": no padding), dropped ("drop"), or cut short ("truncate").
      pieces_begin_with_bos: whether each piece of a long sample begins with BOS if the tokenizer begins texts
        with it: so the teacher reads a piece as it reads a prompt.
      piece_lengths: a mixture of context lengths in rows of one shape: the rows take these lengths in turn,
        and a row of 2048 tokens with length 256 has eight pieces of 256, each in its own segment. So each
        length has an equal share of the tokens. Empty: all rows have pieces of up to `seq_len`.
      fuse_positions: share of the rows that get one segment and running positions (ArcticTraining's
        `fuse_positions_prob`, 0.1 in its long-context recipes).
    """

    section = "data."
    sources: Annotated[tuple[str, ...], every()]
    seq_len: Annotated[int, partial(integer, least=2)]  # a token and its target
    batch_size: Count
    weights: Annotated[tuple[float, ...], every(partial(above, least=0))] = ()
    columns: Annotated[tuple[str, ...], every()] = ()
    stream_rows: Annotated[int | None, partial(integer, least=1)] = None
    seed: Annotated[int, partial(integer, least=0, most=2**64 - 1)] = 0
    pack: bool = True
    split: Annotated[str, one_of("train", "tuning", "held_out", "all")] = "all"
    mask: Annotated[str, one_of("all", "assistant")] = "all"
    chats: Annotated[str, one_of("template", "plain")] = "template"
    append_eos: bool = True
    skip_bad_lines: bool = False
    limit: Annotated[int | None, partial(integer, least=1)] = None
    long_documents: Annotated[str, one_of("split", "fill", "drop", "truncate")] = "split"
    pieces_begin_with_bos: bool = True
    piece_lengths: Annotated[tuple[int, ...], every()] = ()
    fuse_positions: Annotated[float, partial(number, least=0, most=1)] = 0.0

    def __post_init__(self):
        if isinstance(self.sources, str) or not self.sources:
            raise UsageError(f"data.sources is a tuple of at least one source, not {self.sources!r}")
        super().__post_init__()
        check_columns(self.columns)
        if self.chats == "plain" and self.mask == "assistant":
            raise UsageError('data.mask="assistant" needs data.chats="template": change one of them')
        if self.weights and len(self.weights) != len(self.sources):
            raise UsageError(f"data.weights {self.weights}: give one for each of {len(self.sources)} sources")
        for length in self.piece_lengths:
            integer("data.piece_lengths", length, 2, self.seq_len)
        if self.piece_lengths and self.long_documents in ("drop", "truncate"):
            raise UsageError(f"data.piece_lengths need long_documents split or fill: {self.long_documents}")
        if self.fuse_positions and not self.pack:
            raise UsageError("data.fuse_positions needs data.pack=True: one sample has nothing to fuse")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The most tokens of a piece, for the rows in turn."""
        return self.piece_lengths or (self.seq_len,)


class Samples(Sequence):
    """The samples of a config: its split of the documents, tokenised on demand; the latest are cached.

    Attributes:
      bos: the id that texts begin with, or None.
      skipped: what was wrong with each sample that was met and skipped, by index. It is empty wherever it is
        met: so the order of all others is the same.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer):
        if config.append_eos and not tokenizer.eos_ids:
            raise UsageError(f"the tokenizer of {tokenizer.name} has no EOS token: set data.append_eos=False")
        self.config, self.tokenizer = config, tokenizer
        begins = config.pieces_begin_with_bos and tokenizer.encode("")[:1] == [tokenizer.bos_id]
        self.bos = tokenizer.bos_id if begins else None
        self.documents = documents_of(config)
        indices: Sequence[int] | np.ndarray = range(len(self.documents))
        if config.split != "all":
            chosen = (split_of(name) == config.split for name in self.documents.ids())
            indices = np.flatnonzero(np.fromiter(chosen, bool, len(self.documents)))
        if not len(indices):
            share = '1 in 20 is held out, 1 in 40 for tuning; split="all" uses every one'
            here = f"of {len(self.documents)} in {', '.join(config.sources)}"
            raise UsageError(f'split "{config.split}" has no document {here}: about {share}')
        self.indices = indices[: config.limit]
        ends = np.searchsorted(self.indices, self.documents.ends) if config.weights else ()
        self.sizes = tuple(int(size) for size in np.diff(ends))  # samples of each source, where they count
        self._cache: collections.OrderedDict[int, Sample] = collections.OrderedDict()
        self._cached = 0
        self.skipped: dict[int, str] = {}
        if not any(len(self[index]) for index in range(len(self))):
            dropped = config.long_documents == "drop"
            reason = f"longer than data.seq_len {config.seq_len}" if dropped else "empty"
            reason = next((f"broken or {reason}: {why}" for why in self.skipped.values()), reason)
            raise UsageError(f"every sample of {', '.join(config.sources)} is {reason}")

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        sample = self._cache.pop(index, None)
        if sample is None:
            sample = self._tokenise(index)
            self._cached += len(sample)
        self._cache[index] = sample
        while self._cached > _CACHED_TOKENS and len(self._cache) > 1:
            self._cached -= len(self._cache.popitem(last=False)[1])
        return sample

    def digest(self) -> str:
        """A hash of the ids of a few samples: what else changes in a tokenizer does not matter."""
        digest = sha256()
        for index in range(0, len(self), -(-len(self) // 8)):
            with contextlib.suppress(UsageError):  # it is skipped, or named when it is met
                digest.update(self[index].tokens.tobytes())
            digest.update(b";")
        return digest.hexdigest()[:16]

    def _tokenise(self, index: int) -> Sample:
        document = self.documents[int(self.indices[index])]
        if document.text and self.config.mask == "assistant":
            advice = f'document {document.id} is a text: set mask="all"'
            raise UsageError(f'data.mask="assistant" needs chats, and {advice}')
        try:
            ids, learn = self._encode(document)
        except UsageError as error:  # of the chat template or the tokenizer
            why = f"{document.place or document.id}: {error}"
            if not self.config.skip_bad_lines:
                advice = "Fix it, or let swiftkv train or distil skip it: --set data.skip_bad_lines=True"
                raise UsageError(f"{why}. {advice}") from error
            self.skipped[index], ids, learn = why, [], []
        sample = Sample(document.id, np.asarray(ids, np.int32), np.asarray(learn, bool), self.bos)
        if len(sample) <= self.config.seq_len or self.config.long_documents in ("split", "fill"):
            return sample
        return sample.cut(0, self.config.seq_len if self.config.long_documents == "truncate" else 0)

    def _encode(self, document: Document) -> tuple[list[int], list[bool]]:
        if document.messages and self.config.chats == "plain":
            document = Document(document.id, "\n\n".join(m["content"] for m in document.messages))
        if document.messages:
            if self.config.mask == "assistant":
                return self.tokenizer.assistant_mask(document.messages, _CHAT_DATE)
            ids = self.tokenizer.encode_chat(document.messages, False, _CHAT_DATE)
            return ids, [True] * len(ids)
        if not document.text:
            return [], []
        ids = self.tokenizer.encode(document.text)
        if self.config.append_eos and ids[-1] not in self.tokenizer.eos_ids:
            ids = [*ids, self.tokenizer.eos_ids[0]]
        return ids, [True] * len(ids)


def documents_of(config: DataConfig) -> Documents:
    """The documents of a config's sources, those of every split."""
    return open_documents(config.sources, config.skip_bad_lines, config.columns, config.stream_rows)
