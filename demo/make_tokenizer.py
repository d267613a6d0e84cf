"""Train the demo's byte-level BPE tokenizer on the training documents of the corpus."""

import argparse
import json
import lzma
from hashlib import sha256
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BEGIN, END = "<|begin|>", "<|end|>"
VOCABULARY = 2048
MAX_LENGTH = 2048
# Llama 3's pre-tokenizer: at most three digits together, and indentation separate from the text after it.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A plain-text transcript, since the teacher was trained on documentation only, not on chats.
CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message.role | capitalize }}: {{ message.content | trim }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def held_out(document_id: str) -> bool:
    """Whether a piece belongs to the held-out documents; all pieces of one source agree."""
    return int(sha256(document_id.split("#")[0].encode()).hexdigest()[:8], 16) % 20 == 0


def read_training_texts(path: Path) -> list[str]:
    """The texts of the corpus that are not held out."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return [record["text"] for record in records if not held_out(record["id"])]


def train(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer that puts BEGIN in front of a text and decodes to the same bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT,
    )


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=here / "corpus.jsonl.xz")
    parser.add_argument("--output", type=Path, default=here / "tokenizer")
    arguments = parser.parse_args()

    tokenizer = train(read_training_texts(arguments.corpus))
    tokenizer.save_pretrained(arguments.output)
    print(f"{len(tokenizer)} tokens in {arguments.output}")


if __name__ == "__main__":
    main()
