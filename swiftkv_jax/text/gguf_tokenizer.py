"""The tokenizer in a GGUF file, converted to an equivalent tokenizer.json and tokenizer_config.json.

A GGUF file names its algorithm (`tokenizer.ggml.model`) and its pre-tokenizer (`tokenizer.ggml.pre`). The
meaning of these names is taken from the published tokenizer.json of such models.
"""

import typing
from collections.abc import Mapping

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.gguf_header import Header

TOKENS = "tokenizer.ggml.tokens"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_END}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_END}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_GPT2 = [_BYTES | {"use_regex": True}]
_DIGITS = [{"type": "Digits", "individual_digits": True}, *_GPT2]


def _by_pattern(pattern: str) -> list[dict]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _BYTES | {"use_regex": False}]


# `tokenizer.ggml.pre` -> how a text is split; whether it begins with BOS if the file does not say; and
# whether a whole word that is a token is taken without merges.
_SPLITS: dict[str, tuple[list[dict], bool]] = {
    **dict.fromkeys(("gpt-2", "gpt2"), (_GPT2, False)),
    **dict.fromkeys(("smollm", "starcoder", "refact"), (_DIGITS, False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_by_pattern(_QWEN2), False)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), (_by_pattern(_LLAMA3), True)),
    "tekken": (_by_pattern(_TEKKEN), True),
}
_NFC = ("qwen2", "deepseek-r1-qwen")
_SPACE = "\u2581"  # SentencePiece's space
# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_files(header: Header) -> dict[str, dict]:
    """tokenizer.json and tokenizer_config.json, as JSON, by their names; empty if the file has no tokens."""
    if TOKENS not in header.metadata:
        return {}
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in header.metadata.items()}
    try:
        return _files(fields, header.metadata.get("tokenizer.chat_template"))
    except UsageError as error:
        raise UsageError(f"the tokenizer of {header.path}: {error}; give another one's folder") from None


def _files(data: Mapping[str, typing.Any], template) -> dict[str, dict]:
    tokens = _list(data, "tokens", str)
    kinds = _list(data, "token_type", int) or [1] * len(tokens)
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        counts = len(set(tokens)), len(tokens), len(kinds)
        raise UsageError("it has {} different tokens, {} ids and {} types".format(*counts))
    vocab = {token: index for index, token in enumerate(tokens)}
    named = {name: _named(data, key, tokens) for name, key in _NAMED.items()}
    named = {name: token for name, token in named.items() if token is not None}
    kind = data.get("model")
    if kind == "gpt2":
        parts, bos = _byte_level(data, vocab)
    elif kind == "llama":
        parts, bos = _sentence_piece(data, vocab, kinds, named.get("unk_token"))
    else:
        raise UsageError(f"tokenizer.ggml.model {str(kind)[:60]!r} is not known; gpt2 and llama are")
    special = {index for index, each in enumerate(kinds) if each in (_UNKNOWN, _CONTROL)}
    special |= {vocab[token] for token in named.values()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": index, "content": token, **flags, "special": index in special}
        for index, token in enumerate(tokens)
        if index in special or kinds[index] == _USER
    ]
    first = named.get("bos_token") if data.get("add_bos_token", bos) else None
    last = named.get("eos_token") if data.get("add_eos_token", False) else None
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    if isinstance(template, str):
        config["chat_template"] = template
    return {"tokenizer.json": _whole(parts, added, first, last, vocab), "tokenizer_config.json": config}


def from_merges(pre: str, vocab: dict[str, int], merges: list[str], bos: str | None, eos: str | None) -> dict:
    """tokenizer.json of a model that has GPT-2's vocab.json and merges.txt instead.

    pre: how texts are split, as in `tokenizer.ggml.pre`. bos, eos: what is put around them.
    """
    parts, _ = _byte_level({"pre": pre, "merges": merges}, vocab)
    return _whole(parts, [], bos, eos, vocab)


def _whole(parts: dict, added: list[dict], bos: str | None, eos: str | None, vocab: dict[str, int]) -> dict:
    """tokenizer.json, with a post-processor that adds `bos` and `eos` around a text."""
    first, last = ([{"SpecialToken": {"id": x, "type_id": 0}}] if x else [] for x in (bos, eos))
    text, second_text = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    around = _BYTES | {"trim_offsets": False, "use_regex": True}
    if bos or eos:
        around = {
            "type": "TemplateProcessing",
            "single": [*first, text, *last],
            "pair": [*first, text, *last, *first, second_text, *last],
            "special_tokens": {x: {"id": x, "ids": [vocab[x]], "tokens": [x]} for x in (bos, eos) if x},
        }
    fields = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return {**fields, **parts, "post_processor": around}


def _list(data: Mapping, name: str, kind: type) -> list:
    values = data.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise UsageError(f"tokenizer.ggml.{name} is not a list of {kind.__name__}")
    return values


def _named(data: Mapping, key: str, tokens: list[str]) -> str | None:
    index = data.get(key)
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise UsageError(f"tokenizer.ggml.{key} is {str(index)[:40]}, and it has {len(tokens)} tokens")
    return tokens[index]


def _byte_level(data: Mapping, vocab: dict[str, int]) -> tuple[dict, bool]:
    """GPT-2's algorithm: (the parts of tokenizer.json, whether texts begin with BOS by default)."""
    pre = data.get("pre")  # files of before May 2024 lack it
    if pre not in _SPLITS:
        reason = "is missing" if pre is None else f"{str(pre)[:60]!r} is not known"
        reason += f", and texts would be split wrongly; these are known: {', '.join(_SPLITS)}"
        raise UsageError(f"tokenizer.ggml.pre {reason}")
    splits, whole_words = _SPLITS[pre]
    model = _bpe(vocab, [merge.split(" ") for merge in _list(data, "merges", str)])
    return {
        "normalizer": {"type": "NFC"} if pre in _NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "decoder": _BYTES | {"use_regex": True},
        "model": model | {"ignore_merges": whole_words},
    }, whole_words


def _bpe(vocab: dict[str, int], merges: list[list[str]]) -> dict:
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise UsageError(f"the merge {' '.join(pair)[:60]!r} is not of two tokens that make a third")
    names = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    return {"type": "BPE", **dict.fromkeys(names), **flags, "vocab": vocab, "merges": merges}


def _sentence_piece(
    data: Mapping, vocab: dict[str, int], kinds: list[int], unknown: str | None
) -> tuple[dict, bool]:
    """SentencePiece's BPE, as `_byte_level`. It has scores instead of merges: the best piece is merged
    first."""
    scores = _list(data, "scores", float)
    if len(scores) != len(vocab):
        raise UsageError(f"it has {len(vocab)} tokens and {len(scores)} scores")
    pieces = {
        token: index for token, index in vocab.items() if kinds[index] not in (_CONTROL, _UNKNOWN, _BYTE)
    }
    merges = [
        (-scores[index], pieces[token[:cut]], pieces[token[cut:]], [token[:cut], token[cut:]])
        for token, index in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    model = _bpe(vocab, [pair for *_, pair in sorted(merges)])
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    before: list[dict] = [space]
    after: list[dict] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if data.get("add_space_prefix", True):
        before.insert(0, {"type": "Prepend", "prepend": _SPACE})
        after.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": before},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": after},
        "model": model | {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }, True
