"""The `swiftkv` model for lm-eval, EleutherAI's evaluation harness: any of our checkpoints, in process.

    swiftkv eval --model swiftkv --model_args pretrained=DIR,dtype=float32 --tasks hellaswag

takes all arguments of `lm_eval`. To call lm-eval from Python, import this module: that registers the model.
It reads the same tokens as lm-eval's own `hf` model, so that both give the same numbers:

* `loglikelihood`: with a context limit of C (`max_length`), the last C + 1 tokens of context and continuation
  are used. The last token is only predicted, never read. Truncation drops the beginning of the context.
* `loglikelihood_rolling`: windows of C tokens, each token predicted once: the first window begins with the
  prefix token (BOS, or else EOS), each later one with the token before its first prediction. The last window
  is full too: it begins with tokens that were predicted before, as context.
* `generate_until`: the last C - `max_gen_toks` tokens of the context; the end-of-text token stops as well.

`local-completions`, the harness's client for servers, reads less: of `max_length=M` it keeps M - 1 tokens
for `loglikelihood`, rolls windows of M - 2, and leaves M - 1 - `max_gen_toks` for a context. It also leaves
out the tokenizer's BOS unless `add_bos_token=True` is given. For shorter texts both read the same tokens and
give the same numbers, to the last bit: the server and this model call the same `LLM.score`.
"""

# pyright: reportMissingImports=false
import typing

import lm_eval.models  # noqa: F401 (registers its own first: ours alone would look complete)
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from swiftkv_jax.common.errors import UsageError, exit_code
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.text.tokenizer import Tokenizer

_CONTROL = ("do_sample", "until", "max_gen_toks")  # of a task's generation_kwargs: not for SamplingParams
_Window = tuple[typing.Any, list[int], list[int]]  # cache key, context, continuation


@register_model("swiftkv")
class SwiftKV(TemplateLM):
    """An `LLM` behind lm-eval's three kinds of request.

    Attributes:
      llm: the model that answers. tokenizer: transformers' own, for chat templates.
      max_length: C, see above.
    """

    def __init__(
        self,
        pretrained: str | LLM,
        dtype: str = "auto",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        tokenizer: str | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        seed: int = 1234,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings,
    ):
        """Load a folder or hub id, or take an LLM.

        Args:
          max_gen_toks: for tasks that do not set it. add_bos_token: None does as the tokenizer does.
          seed: of tasks that sample; the same for all their requests, as in the harness's client.
          batch_size, max_batch_size, device: lm-eval always sends them, and they are not used: the engine
            batches by itself, up to `max_num_seqs`, and JAX chooses the device (JAX_PLATFORMS).
          settings: other arguments of `LLM`, such as max_num_seqs, cache_dtype, num_pages.
        """
        super().__init__()
        if isinstance(pretrained, LLM):
            self.llm = pretrained
        else:
            self.llm = LLM(pretrained, dtype=dtype, max_model_len=max_length, tokenizer=tokenizer, **settings)
        known = self.llm.tokenizer
        if not isinstance(known, Tokenizer):
            raise UsageError("evaluation needs a tokenizer; this LLM has none")
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=known.rust, chat_template=known.chat_template, **known.named
        )
        self.max_length = max_length or self.llm.settings.max_model_len
        self.max_gen_toks, self.add_bos_token, self.seed = int(max_gen_toks), add_bos_token, int(seed)
        self._prefix = prefix_token_id

    @property
    def eot_token_id(self) -> int | None:
        return next(iter(self.llm.tokenizer.eos_ids), None)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, or EOS if there is none."""
        for token in (self._prefix, self.llm.tokenizer.bos_id, self.eot_token_id):
            if token is not None:
                return token
        raise UsageError("the tokenizer has no BOS and no EOS token; give prefix_token_id=N")

    @property
    def tokenizer_name(self) -> str:
        """The name under which lm-eval caches requests."""
        return self.llm.tokenizer.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True):
        """The text of a chat with the model's own template; without a generation prompt its last turn stays
        open."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Token ids; a text that begins with BOS gets no second one."""
        chosen = (add_special_tokens, self.add_bos_token, True)
        special = next(flag for flag in chosen if flag is not None)
        return self.llm.tokenizer.encode(string, add_special_tokens=special)

    def _loglikelihood_tokens(
        self, requests: list[_Window], disable_tqdm: bool = False, **kwargs
    ) -> list[tuple[float, bool]]:
        """The summed log probability of each continuation, and whether greedy decoding would write it."""
        out = []
        for key, context, continuation in tqdm(requests, desc="loglikelihood", disable=disable_tqdm):
            if len(continuation) > self.max_length:
                size = len(continuation)
                raise UsageError(f"a continuation of {size} tokens is above the context {self.max_length}")
            ids = (context + continuation)[-(self.max_length + 1) :]
            answer = self.scored(ids, len(ids) - len(continuation))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
            out.append(answer)
        return out

    def scored(self, ids: list[int], start: int) -> tuple[float, bool]:
        """Of the ids from `start` on: their log probability, and whether each is the likeliest."""
        entries = zip(ids[start:], self.llm.score(ids)[start:], strict=True)
        chosen = [(entry or {})[token] for token, entry in entries]
        return sum(token.logprob for token in chosen), all(token.rank == 1 for token in chosen)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """The log probability of whole texts, see above."""
        out = []
        for (text,) in tqdm([r.args for r in requests], desc="rolling", disable=disable_tqdm):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            total = sum(value for value, _ in self._loglikelihood_tokens(pairs, disable_tqdm=True))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            out.append(total)
        return out

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Generate texts up to a stop; all requests form one batch, whatever their arguments."""
        prompts, params = [], []
        for context, options in (r.args for r in requests):
            chosen = self.sampling(options)
            ids = self.tok_encode(context) or [self.prefix_token_id]
            prompts.append(ids[-(self.max_length - (chosen.max_tokens or 0)) :])
            params.append(chosen)
        texts = self.written(prompts, params, disable_tqdm)
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def written(self, prompts: list[list[int]], params: list[SamplingParams], quiet: bool) -> list[str]:
        """The texts that follow some prompts."""
        outputs = self.llm.generate(prompts, params, use_tqdm=not quiet)
        return [output.outputs[0].text for output in outputs]

    def sampling(self, options: dict) -> SamplingParams:
        """The model's own defaults, overridden by a task's generation_kwargs."""
        kwargs: dict[str, typing.Any] = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        eos: typing.Any = self.tokenizer.eos_token
        until = handle_stop_sequences(kwargs["until"], eos=eos)
        most = kwargs["max_gen_toks"]
        if most >= self.max_length:
            raise UsageError(f"max_gen_toks {most} leaves no room for a prompt in {self.max_length} tokens")
        if kwargs.pop("num_beams", 1) != 1:
            raise UsageError("num_beams: beam search is not offered")
        changes = {name: value for name, value in kwargs.items() if name not in _CONTROL}
        if not kwargs["do_sample"]:
            changes["temperature"] = 0.0
        stop = [text for text in until if text]
        return self.llm.defaults.updated({"seed": self.seed} | changes | {"stop": stop, "max_tokens": most})


def main() -> int:
    """`lm_eval` with one more model; exit code 2 for what this model refuses."""
    from lm_eval.__main__ import cli_evaluate

    return exit_code(cli_evaluate)
