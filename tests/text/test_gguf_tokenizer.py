"""The tokenizer in a GGUF file gives the ids of the tokenizer that the file was written from."""

import json
from pathlib import Path

import gguf_made
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.gguf_header import read_header
from swiftkv_jax.text.gguf_tokenizer import _LLAMA3, _QWEN2, _TEKKEN, tokenizer_files
from swiftkv_jax.text.tokenizer import has_tokenizer, load_tokenizer

CORPUS = [
    *(Path(__file__).parents[2] / "docs" / "architecture.md").read_text().splitlines(),
    "I'LL say: 1234 cafés, 猫 naïve — don't!  x = {3}\r\n\t\treturn" * 3,
]
TEXTS = (
    "",
    " ",
    "Hello  world! I'm 12345, she'LL go\n\n  x = {3};\r\n\treturn  # é 猫 🙂",
    "the cache<|end|> of a row<think> e\u0301",
    "  two spaces, and three   ",
)
CONTROL, USER = "<|end|>", "<think>"
TEMPLATE = "{% for m in messages %}{{ m['content'] + '<|end|>' }}{% endfor %}"


def trained(pre, normalizer=None, alphabet=(), decoder=None, **options) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(**options))
    made.pre_tokenizer, made.normalizer, made.decoder = pre, normalizer, decoder
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=list(alphabet),
        special_tokens=["<unk>", CONTROL],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([tokenizers.AddedToken(USER, normalized=False)])
    return made


def write(path: Path, made: tokenizers.Tokenizer, **fields) -> Path:
    """A GGUF file with this tokenizer and no weights."""
    raw, vocab = json.loads(made.to_str()), made.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = {"<unk>": 2, CONTROL: 3, USER: 4}
    kinds |= {token: 6 for token in tokens if token.startswith("<0x")}
    keys: dict = {
        "tokens": tokens,
        "token_type": [kinds.get(token, 1) for token in tokens],
        "eos_token_id": vocab[CONTROL],
        "merges": [" ".join(pair) for pair in raw["model"]["merges"]],
    }
    keys = {f"tokenizer.ggml.{key}": value for key, value in (keys | fields).items() if value is not None}
    return gguf_made.raw(path, "llama", keys | {"tokenizer.chat_template": TEMPLATE}, {}, gguf_made.KIND.F32)


def by_pattern(pattern: str):
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


PRE = {
    "gpt-2": pre_tokenizers.ByteLevel(False),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
    "qwen2": by_pattern(_QWEN2),
    "llama-bpe": by_pattern(_LLAMA3),
}


def test_our_patterns_are_those_of_transformers():
    assert {GGUF_PRE_TOKENIZER_SPLITS[pre] for pre in ("llama-bpe", "llama3", "llama-v3")} == {_LLAMA3}
    assert {GGUF_PRE_TOKENIZER_SPLITS[pre] for pre in ("qwen2", "deepseek-r1-qwen")} == {_QWEN2}
    assert GGUF_PRE_TOKENIZER_SPLITS["tekken"] == _TEKKEN


@pytest.mark.parametrize("pre", PRE)
def test_byte_level_ids_are_those_of_the_original(pre, tmp_path):
    made = trained(
        PRE[pre],
        normalizers.NFC() if pre == "qwen2" else None,
        pre_tokenizers.ByteLevel.alphabet(),
        decoders.ByteLevel(),
        ignore_merges=pre == "llama-bpe",
    )
    begins = pre == "llama-bpe"
    path = write(
        tmp_path / "model.gguf",
        made,
        model="gpt2",
        pre=pre,
        bos_token_id=made.token_to_id(CONTROL) if begins else None,
    )
    ours = load_tokenizer(path)
    for text in TEXTS:
        ids = made.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == [made.token_to_id(CONTROL)] * begins + ids
        assert ours.decode(ids, skip_special_tokens=False) == made.decode(ids, skip_special_tokens=False)
    assert (ours.eos_ids, tuple(ours.special_texts)) == ((made.token_to_id(CONTROL),), ("<unk>", CONTROL))
    assert ours.encode_chat([{"role": "user", "content": "row"}], False)[-1] == made.token_to_id(CONTROL)


@pytest.mark.parametrize("space", [True, False], ids=["space", "no_space"])
def test_scores_give_back_the_merges_they_stand_for(space, tmp_path):
    """SentencePiece: no merges in the file, scores that fall from the first to the last."""
    spaces = normalizers.Replace(" ", "▁")
    steps = [normalizers.Prepend("▁"), spaces] if space else [spaces]
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made = trained(
        pre_tokenizers.Split("▁", "merged_with_next"),
        normalizers.Sequence(steps),
        decoder=decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if space else back),
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    made.pre_tokenizer = None
    raw = json.loads(made.to_str())
    ranks = {"".join(pair): rank for rank, pair in enumerate(raw["model"]["merges"])}
    tokens = sorted(made.get_vocab(), key=made.get_vocab().__getitem__)
    path = write(
        tmp_path / "model.gguf",
        made,
        model="llama",
        merges=None,
        scores=[-float(ranks.get(token, -1) + 1) for token in tokens],
        bos_token_id=1,
        unknown_token_id=0,
        add_space_prefix=space,
    )
    ours = load_tokenizer(path)
    for text in TEXTS:
        ids = made.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids, skip_special_tokens=False) == made.decode(ids, skip_special_tokens=False)


def byte_level(path: Path, **fields) -> Path:
    made = trained(PRE["gpt-2"], None, pre_tokenizers.ByteLevel.alphabet(), decoders.ByteLevel())
    return write(path, made, **({"model": "gpt2", "pre": "gpt-2"} | fields))


def test_bos_and_eos_are_added_as_the_file_says(tmp_path):
    path = byte_level(tmp_path / "a.gguf", bos_token_id=5, add_bos_token=True, add_eos_token=True)
    assert load_tokenizer(path).encode("") == [5, 1]


def test_the_files_that_are_saved_load_as_the_file_does(tmp_path):
    path = byte_level(tmp_path / "model.gguf")
    (tmp_path / "out").mkdir()
    for name, fields in tokenizer_files(read_header(path)).items():
        (tmp_path / "out" / name).write_text(json.dumps(fields))
    ours, saved = load_tokenizer(path), load_tokenizer(tmp_path / "out")
    assert ours.fingerprint == saved.fingerprint
    assert load_tokenizer(tmp_path).fingerprint == ours.fingerprint, "of a folder with one such file"


def test_a_file_without_tokens_has_no_tokenizer(tmp_path):
    path = gguf_made.raw(tmp_path / "model.gguf", "llama", {}, {}, gguf_made.KIND.F32)
    assert not has_tokenizer(path) and tokenizer_files(read_header(path)) == {}
    with pytest.raises(UsageError, match="no tokenizer in"):
        load_tokenizer(path)


CORRUPTED = [
    *({"model": "bert"}, {"pre": None}, {"pre": "unheard-of"}, {"token_type": [1]}, {"tokens": [1, 2]}),
    *({"tokens": ["a", "a"], "token_type": [1, 1]}, {"eos_token_id": 10**6}, {"merges": ["ab"]}),
    *({"merges": ["zz qq"]}, {"model": "llama", "scores": [1.0]}),
]


@pytest.mark.parametrize("fields", CORRUPTED)
def test_a_corrupted_tokenizer_is_refused(fields, tmp_path):
    with pytest.raises(UsageError):
        load_tokenizer(byte_level(tmp_path / "model.gguf", **fields))
