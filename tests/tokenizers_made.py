"""Small tokenizers for tests: every byte, a few merges, special tokens and a chat template."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = ["the cat sat on the mat and the dog sat on the log, assistant user"]
BOS, EOS, START, END = "<|bos|>", "<|eos|>", "<|start|>", "<|end|>"
# As Qwen's: a system prompt of its own, END closes a turn, a line break follows.
CHATML = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}<|start|>system\nBe brief.<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
GENERATION = CHATML.replace(
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n",
    "<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}\n",
)
# As Llama 2's: spaces around the answer, which is trimmed, and EOS behind it.
INSTRUCT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} {{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# No special tokens at all: a line break ends a turn.
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def make_words(folder: Path) -> Path:
    """Save a tokenizer whose word wN is token N, of 101."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(101)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


def make_tokenizer(folder: Path, template: str | None = None, bos: bool = True) -> Path:
    """Save a tokenizer of about 300 tokens; it puts BOS in front of a text unless told otherwise."""
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    specials = [BOS, EOS, START, END]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rust.train_from_iterator(TEXT * 4, trainer)
    if bos:
        rust.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, rust.token_to_id(BOS))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rust,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[START, END],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def trained(kind: str, specials: list[str], around: tuple[str, str] = ("", "")) -> Tokenizer:
    """A tokenizer as families publish them in tokenizer.json, with about 400 tokens.

    Args:
      kind: "bytes" (GPT-2, Llama 3, Qwen, OLMo, Whisper), "pieces" (Llama 2 and Mistral: SentencePiece's BPE
        with byte fallback, a space in front), "plain_pieces" (Gemma: no space in front) or "unigram" (T5).
      specials: the special tokens, in the order of their ids. around: the tokens before and after each text.
    """
    rust = Tokenizer(models.Unigram() if kind == "unigram" else models.BPE())
    spaces, space = normalizers.Replace(" ", "▁"), decoders.Replace("▁", " ")
    back = [space, decoders.ByteFallback(), decoders.Fuse()]
    alphabet, trainer = [], trainers.BpeTrainer
    if kind == "bytes":
        rust.pre_tokenizer, rust.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    elif kind == "unigram":
        metaspace = pre_tokenizers.Metaspace(prepend_scheme="always")
        rust.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
        rust.decoder, trainer = decoders.Metaspace(prepend_scheme="always"), trainers.UnigramTrainer
    else:
        first = kind == "pieces"
        rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if first else spaces
        rust.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if first else back)
        rust.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for training alone
    fallback = [] if kind in ("bytes", "unigram") else [f"<0x{byte:02X}>" for byte in range(256)]
    options = {"unk_token": "<unk>"} if kind == "unigram" else {}
    rust.train_from_iterator(
        TEXT * 4,
        trainer(
            vocab_size=len(specials) + len(fallback) + (330 if kind == "bytes" else 120),
            special_tokens=[*specials, *fallback],
            initial_alphabet=list(alphabet),
            show_progress=False,
            **options,
        ),
    )
    fields = json.loads(rust.to_str())
    if fallback:
        fields["added_tokens"] = fields["added_tokens"][: len(specials)]
        fields["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
        fields["pre_tokenizer"] = None
    rust = Tokenizer.from_str(json.dumps(fields))
    if any(around):
        marks = " ".join(around).split()
        rust.post_processor = processors.TemplateProcessing(
            single=" ".join(filter(None, (around[0], "$A", around[1]))),
            special_tokens=[(token, rust.token_to_id(token)) for token in dict.fromkeys(marks)],
        )
    return rust


def make_sentencepiece(folder: Path) -> Path:
    """Save a tokenizer in Llama 2's form: spaces are part of tokens, bytes fall back to tokens of their own,
    and decoding drops the first space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "\ufffd"]
    pieces += [*"truesmaé雪", "tr", "ue", "true", "▁true", "▁a"]
    merges = [("t", "r"), ("u", "e"), ("tr", "ue"), ("▁", "true"), ("▁", "a"), ("▁", "▁")]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    rust = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=rust, **special).save_pretrained(folder)
    return folder
