"""The `swiftkv_baseline` model for lm-eval: another system on a model's weights (see swiftkv_jax/lm_eval.py).

    python -m benchmarks.papers.baselines.lm_eval --model swiftkv_baseline --tasks hellaswag \\
        --model_args pretrained=DIR,dtype=float32,system=lazy_llm,start=0.75,end=0.5

The systems are random_pruning, static_pruning, lazy_llm and ffn_skip, with their fields. A system reads the
context in its own way, and each token of a continuation as one that it generated; it generates greedily.
"""

# pyright: reportMissingImports=false
import sys

from lm_eval.api.registry import register_model
from tqdm import tqdm

from benchmarks.papers import baselines
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.engine.sequence import Choice, Sequence
from swiftkv_jax.lm_eval import SwiftKV, main

# Arguments that lm-eval always sends, or that concern the tokenizer.
SHARED = ("max_gen_toks", "tokenizer", "add_bos_token", "prefix_token_id", "seed")
SHARED += ("batch_size", "max_batch_size", "device")


@register_model("swiftkv_baseline")
class SwiftKVBaseline(SwiftKV):
    """A baseline behind lm-eval's three kinds of request."""

    def __init__(
        self, pretrained: str | LLM, system: str, dtype: str = "auto", max_length: int | None = None, **fields
    ):
        """Load a folder or hub id, or take an LLM.

        Args:
          system: a name of `baselines.named`. fields: of that system.

        Raises:
          UsageError: as `SwiftKV`, or the system does not fit the model.
        """
        given = {name: fields.pop(name) for name in SHARED if name in fields}
        self.system = baselines.named(system, **fields)
        super().__init__(pretrained, dtype=dtype, max_length=max_length, **given)
        baselines.check(self.llm.model, self.system)

    def scored(self, ids: list[int], start: int) -> tuple[float, bool]:
        model, params = self.llm.model, self.llm.params
        values, likeliest = baselines.follow(model, params, self.system, ids[:start], ids[start:])
        return float(values.sum()), bool(likeliest.all())

    def written(self, prompts: list[list[int]], params: list[SamplingParams], quiet: bool) -> list[str]:
        """The text after each prompt; it ends as in the engine."""
        texts, model, weights = [], self.llm.model, self.llm.params
        pairs = list(zip(prompts, params, strict=True))
        for prompt, own in tqdm(pairs, desc="generate", disable=quiet):
            if not own.greedy or own.penalised or own.biased or own.min_tokens:
                raise UsageError("a baseline generates greedily: leave out do_sample and the like")
            request = self.llm.request(prompt, own)
            sequence, most = Sequence(request, 0, self.llm.tokenizer, 0.0), request.max_length - len(prompt)
            for token in baselines.stream(model, weights, self.system, prompt, most):
                sequence.append(Choice(token), 0.0)
                if sequence.finish_reason:
                    break
            texts.append(sequence.completion().text)
        return texts


if __name__ == "__main__":
    sys.exit(main())
