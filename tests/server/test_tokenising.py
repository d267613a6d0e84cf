"""Texts, whatever they are: long ones are read as short ones are, and nothing large holds others up."""

import json
import random
import threading
import time

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers_made import END
from transformers import PreTrainedTokenizerFast

from swiftkv_jax.server import answers
from swiftkv_jax.text.tokenizer import load_tokenizer

# The patterns of Llama 3 and Qwen: a run of white space is tried three ways at each place.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LEARNT = ["aaaaaaaa bbbb the cat sat", " " * 40 + "x", "00000000 7777777777", "🙂🙂🙂🙂", "\n\n\n\n"] * 4


def of_bytes(split: str | None) -> Tokenizer:
    """A byte-level tokenizer like GPT-2's and OLMo's or, with a `split`, Llama 3's and Qwen's."""
    rust = Tokenizer(models.BPE())
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    first = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    rust.pre_tokenizer = pre_tokenizers.Sequence([*first, bytewise])
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rust.train_from_iterator(
        LEARNT, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    )
    return rust


def of_pieces() -> Tokenizer:
    """A tokenizer like those of Llama 2, Mistral and Gemma: a whole text is one word."""
    rust = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    rust.train_from_iterator(
        LEARNT, trainers.BpeTrainer(vocab_size=320, special_tokens=special, show_progress=False)
    )
    return rust


def of_unigrams() -> Tokenizer:
    """A unigram tokenizer like T5's."""
    rust = Tokenizer(models.Unigram())
    rust.normalizer, rust.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    rust.train_from_iterator(LEARNT, trainer)
    return rust


KINDS = {
    "bytes by GPT-2's words": lambda: of_bytes(None),
    "bytes by Llama 3's words": lambda: of_bytes(SPLIT),
    "pieces": of_pieces,
    "unigrams": of_unigrams,
}
TEXTS = {  # repeated to a length
    "a letter": "a",
    "spaces": " ",
    "digits": "7",
    "no spaces": "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=1000)),
    "emoji": "🙂",
    "joined emoji": "👩‍👩‍👧‍👦",
    "line breaks": "\n",
    "spaces and a break": " " * 500 + "\n",
    "marks on one letter": "\u0301",
    "half a control token": END[:-1],
    "control tokens": END,
}


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_are_read_as_short_ones_are(kind, tmp_path):
    """They go by another call of the library; here by the one for short texts, in transformers' hands."""
    source, rust = random.Random(1), KINDS[kind]()
    rust.add_special_tokens([END])
    PreTrainedTokenizerFast(tokenizer_object=rust).save_pretrained(tmp_path)
    tokenizer, theirs = load_tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for _ in range(5):
        text = "".join(source.choice(list(TEXTS.values())) + source.choice("a b7\n") for _ in range(400))
        assert len(text) > 2**12
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"]
            for skip in (True, False):
                assert tokenizer.decode(ids, skip) == theirs.backend_tokenizer.decode(ids, skip)


def longest_stop(work) -> float:
    """The longest that other threads waited while `work` ran on one of its own: a share of its time."""
    working = threading.Thread(target=work)
    began = last = time.perf_counter()
    longest = 0.0
    working.start()
    while working.is_alive():
        time.sleep(0.001)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    return longest / (last - began)


def test_others_are_answered_while_a_large_answer_is_written():
    """A separate thread writes it, but the JSON writer keeps Python's lock until done. Best of five."""
    entry = {"token": "word", "logprob": -1.25, "top_logprobs": {f"w{i}": -float(i) for i in range(20)}}
    choices = [{"index": i, "logprobs": [entry] * 400} for i in range(50)]
    envelope = {"id": "x", "choices": [], "usage": {"prompt_tokens": 3}}
    whole: list[bytes] = []
    shares = [longest_stop(lambda: whole.append(answers.joined(envelope, iter(choices)))) for _ in range(5)]
    assert json.loads(whole[0]) == envelope | {"choices": choices}
    assert min(shares) < 0.4, shares
