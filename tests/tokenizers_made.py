"""Small byte-level tokenizers for tests: every byte, a few merges, special tokens and a chat template."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

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
    rust.train_from_iterator(
        ["the cat sat on the mat and the dog sat on the log, assistant user"] * 4, trainer
    )
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
