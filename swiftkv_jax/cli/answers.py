"""`swiftkv eval STUDENT --against TEACHER`: the answers of a student beside its teacher's, see
distill/answers.py."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from swiftkv_jax.checkpoint.hf import local_folder
from swiftkv_jax.cli.answering import LANES, beside
from swiftkv_jax.cli.teacher_chats import prompts_of
from swiftkv_jax.common.checks import integer
from swiftkv_jax.common.errors import Parser, UsageError, exit_code, explained
from swiftkv_jax.common.progress import show
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.distill.answers import BEGINNING, compared, ids_of
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.text.tokenizer import load_tokenizer


def parser() -> Parser:
    """All flags of the command."""
    p = Parser(
        description="Answer prompts greedily with a student and with its teacher: how many answers begin "
        "alike, how likely the teacher finds the student's, how often both repeat themselves.",
        epilog="example: %(prog)s runs/mine/export --against HuggingFaceTB/SmolLM2-135M-Instruct "
        "--prompts chats.jsonl",
    )
    p.flag("STUDENT", "a folder or a hub id")
    p.flag("--against TEACHER", "the model that the student was made of", required=True)
    rows = "rows with a prompt, with chats whose last answer is left out, or with texts, whose first "
    p.flag("--prompts FILE", f"{rows}{BEGINNING} tokens are the prompt", required=True)
    p.flag("--count N", "prompts used, from the first (default: %(default)s)", type=int, default=100)
    p.flag("--tokens N", "most tokens of an answer (default: %(default)s)", type=int, default=256)
    p.flag("--cache-dtype D", "of the student's cache (default: %(default)s)", default="auto")
    p.flag("--out FILE", "write every pair of answers there, one JSON object a line", type=Path)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run; exit code 0, 2 for bad usage, 130 for Ctrl-C."""
    return exit_code(lambda: _run(parser().parse_args(argv)), failures=(OSError,))


def _run(args: argparse.Namespace) -> None:
    integer("--count", args.count, 1)
    integer("--tokens", args.tokens, 1)
    prompts = prompts_of(args.prompts, texts=True)[: args.count]
    folders = [local_folder(model) for model in (args.student, args.against)]
    tokenizers = list(map(load_tokenizer, folders))
    read, theirs = ([ids_of(tokenizer, prompt) for prompt in prompts] for tokenizer in tokenizers)
    check_alike((args.student, args.against), (read, theirs))
    longest = fitting(folders, max(map(len, read)) + args.tokens, args.tokens)
    sizes = {"max_model_len": longest, "max_num_seqs": min(LANES, len(prompts)), "dtype": "auto"}
    own, its = beside(
        lambda: LLM(args.student, **sizes, cache_dtype=args.cache_dtype),
        lambda: LLM(args.against, **sizes),
        read,
        args.tokens,
    )
    result = compared(own, its, [tokenizers[0].decode(ids) for ids in read], args.tokens)
    show(result.report(pairs=True))
    if args.out:
        with explained(f"write to {args.out}"):
            args.out.write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in result.pairs))


def check_alike(models: Sequence[str], read: Sequence[Sequence]) -> None:
    """Raises UsageError: models read a prompt as other tokens; `read` has what each reads of every prompt."""
    for number, (first, *others) in enumerate(zip(*read, strict=True)):
        if any(other != first for other in others):
            raise UsageError(
                f"{' and '.join(models)} read prompt {number} as other tokens: answers can be compared if "
                "tokenizer and chat template are the same"
            )


def fitting(folders: Sequence[Path], longest: int, tokens: int) -> int:
    """The longest text, prompt and answer, in tokens.

    Raises:
      UsageError: it is longer than a model's context.
    """
    context = min(ModelConfig.from_hf(folder).longest_context for folder in folders)
    if longest > context:
        raise UsageError(f"--tokens {tokens}: with the longest prompt {longest}, over the context {context}")
    return longest
