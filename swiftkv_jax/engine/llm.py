"""`LLM`: a checkpoint and a list of prompts in, completions out, as in vLLM."""

import dataclasses
import functools
import hashlib
import threading
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh, NamedSharding

from swiftkv_jax import page_fill
from swiftkv_jax import params as weights
from swiftkv_jax.checkpoint.generation import GenerationDefaults, read_generation_config
from swiftkv_jax.checkpoint.hf import from_pretrained, local_folder
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.engine import prefix
from swiftkv_jax.engine.engine import Engine, Group, Stats
from swiftkv_jax.engine.request import Logprob, Request, RequestOutput, SamplingParams, integer
from swiftkv_jax.engine.score import prompt_logprobs
from swiftkv_jax.engine.settings import Settings, empty_pool, settle
from swiftkv_jax.errors import UsageError, suggest
from swiftkv_jax.model import Transformer
from swiftkv_jax.shapes import PyTree
from swiftkv_jax.tokenizer import load_tokenizer

_NOT_COUNTS = (  # settings that are no whole numbers
    "cache_dtype",
    "prefix_caching",
    "memory_fraction",
    "attention",
    "fill",
    "scoring",
    "drafter",
    "exit_threshold",
)
_FROM_GENERATION = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class LLM:
    """A model ready to generate; standard and SwiftKV checkpoints alike.

    With `dynamic` rotary scaling the frequencies are those of `max_model_len`, whatever a request's length.

    Attributes:
      model, params, tokenizer: what it runs; params unstacked layer by layer, folded for a fused fill.
      settings: sizes in force. defaults: the SamplingParams used when a call gives none.
      stats: of the last call, see `engine.Stats.as_dict`.
    """

    def __init__(
        self,
        path_or_id: str | Path,
        dtype: str = "auto",
        max_model_len: int | None = None,
        tokenizer=None,
        mesh: Mesh | None = None,
        seed: int = 0,
        **settings,
    ):
        """Load a folder or a hub id; `tokenizer` is another folder, or an object with its methods.

        `settings` are the other fields of `engine.Settings`: max_num_seqs, num_pages, cache_dtype, ...

        Raises:
          UsageError: the checkpoint or the tokenizer cannot be read, or a setting makes no sense.
        """
        folder = local_folder(path_or_id)
        model, params = from_pretrained(folder, dtype=None if dtype == "auto" else dtype, mesh=mesh)
        if tokenizer is None or isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(tokenizer or folder)
        self._set(
            model, params, tokenizer, read_generation_config(folder), mesh, seed, max_model_len, settings
        )

    @classmethod
    def from_model(
        cls,
        model: Transformer,
        params: PyTree,
        tokenizer=None,
        *,
        generation: GenerationDefaults | None = None,
        max_model_len: int | None = None,
        mesh: Mesh | None = None,
        seed: int = 0,
        **settings,
    ) -> "LLM":
        """An LLM on a model in memory. Without a tokenizer prompts must be token ids, and texts are empty.

        `mesh` is found from the parameters when they lie on one.
        """
        llm = cls.__new__(cls)
        generation = generation or GenerationDefaults()
        llm._set(model, params, tokenizer, generation, mesh, seed, max_model_len, settings)
        return llm

    def _set(self, model, params, tokenizer, generation, mesh, seed, max_model_len, settings):
        self.model, self.tokenizer, self.mesh = model, tokenizer, mesh or _mesh_of(params)
        self.params = params if isinstance(params["lower"], list) else weights.unstack(params)
        limit = _context(model.config, max_model_len)
        devices = sorted(jax.tree.leaves(params)[0].devices(), key=lambda device: device.id)
        self.settings = settle(_settings(limit, settings), model, devices)
        if self.settings.fill is not None:  # here, not in the engine: scoring takes these too
            self.params = page_fill.fold(model.plan, self.params, model.dtype)
        self.defaults = _defaults(generation)
        self.eos_ids = tuple(sorted({*generation.eos_token_ids, *(tokenizer.eos_ids if tokenizer else ())}))
        self.stats: dict[str, int | float] = {}
        self._next_seed, self._next_id = integer("seed", seed, 0), 0
        self._numbering = threading.Lock()  # a server makes requests on several threads

    @functools.cached_property
    def engine(self) -> Engine:
        """The one engine of this LLM: its cache lives on between calls."""
        return Engine(self.model, self.params, self.mesh, self.tokenizer, self.settings)

    @typing.no_type_check  # user input: checked below, by name
    def generate(
        self,
        prompts,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; the answers are in the prompts' order.

        Args:
          prompts: each a str, a list of token ids, or {"prompt": ...} or {"prompt_token_ids": ...}.
          sampling_params: for all, or one for each prompt; `self.defaults` when None.
          use_tqdm: show a progress bar on stderr.

        Raises:
          UsageError: any prompt or parameter is bad, before anything runs; the message names which.
        """
        prompts = [prompts] if _is_one(prompts) else prompts
        if not isinstance(prompts, list | tuple):
            raise UsageError(f"prompts must be a string or a list, not {type(prompts).__name__}")
        params = _spread(sampling_params, len(prompts))
        pairs = enumerate(zip(prompts, params, strict=True))
        requests = [self.request(prompt, p, f"prompts[{i}]") for i, (prompt, p) in pairs]
        return self._run_with_bar(requests, use_tqdm)

    @typing.no_type_check
    def chat(
        self,
        messages,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of them, by the chat template."""
        one = isinstance(messages, list) and bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if one else messages
        if not isinstance(conversations, list | tuple):
            raise UsageError(f"messages must be a list, not {type(messages).__name__}")
        prompts = [{"messages": conversation} for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    @typing.no_type_check
    def request(
        self, prompt, params: SamplingParams | None = None, where: str = "prompt", salt: str = ""
    ) -> Request:
        """Check one prompt and settle its parameters; `where` opens every error message.

        Only requests of one `salt` share cached prefixes.

        Raises:
          UsageError: no tokens, wrong types, ids out of range, or longer than the context.
        """
        params = self.defaults if params is None else params
        if not isinstance(params, SamplingParams):
            raise UsageError(f"{where}: sampling_params must be SamplingParams, not {type(params).__name__}")
        text, ids = self._encode(prompt, where)
        vocab, limit = self.model.config.vocab_size, self.settings.max_model_len
        if not ids:
            raise UsageError(f"{where} is empty; give at least one token")
        named = {
            "token": ids,
            "stop_token_ids:": params.stop_token_ids,
            "allowed_token_ids:": params.allowed_token_ids or (),
            "logit_bias:": list(dict(params.logit_bias)),
        }
        for name, values in named.items():
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise UsageError(f"{where}: token ids must be integers, not {value!r}")
                if not 0 <= value < vocab:
                    raise UsageError(f"{where}: {name} id {value} is outside the vocabulary [0, {vocab})")
        if params.stop and self.tokenizer is None:
            raise UsageError(f"{where}: stop strings need a tokenizer; this LLM has none")
        room = limit - len(ids)
        if room < 1:
            raise UsageError(
                f"{where} has {len(ids)} tokens; a context of {limit} leaves no room to generate"
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise UsageError(
                f"{where} has {len(ids)} tokens; max_tokens {params.max_tokens} would pass the context of "
                f"{limit}: lower max_tokens to {room}, or give None to fill the context"
            )
        settled = {"max_tokens": params.max_tokens or room}
        with self._numbering:
            if params.seed is None:
                settled["seed"], self._next_seed = self._next_seed, self._next_seed + params.n
            self._next_id += 1
            number = self._next_id
        params = dataclasses.replace(params, **settled)
        eos = () if params.ignore_eos else tuple(i for i in self.eos_ids if i < vocab)
        return Request(
            prompt=text,
            token_ids=tuple(ids),
            params=params,
            eos_ids=eos,
            bad_ids=self._bad_ids(params, where),
            root=self._root(salt),
            request_id=str(number),
        )

    def run(self, requests: list[Request]) -> Iterator[tuple[int, RequestOutput]]:
        """(number, output) of each request as it finishes; `stats` are this call's, up to date at each.

        Requests that are not waited for, because the caller stops or fails, are aborted.
        """
        numbers = {request.request_id: number for number, request in enumerate(requests)}
        if not requests:
            return
        engine = self.engine
        engine.stats = Stats(
            cache_bytes=engine.stats.cache_bytes, cache_bytes_per_token=self.cache_bytes_per_token
        )
        try:
            for request in requests:
                engine.add(request)
            while engine.busy:
                groups = engine.step()
                self.stats = engine.stats.as_dict()
                for group in groups:
                    if group.finished:
                        yield numbers[group.request.request_id], self._output(group)
        finally:
            for request in requests:
                engine.abort(request.request_id)
            while engine.busy:
                engine.step()

    def _output(self, group: Group) -> RequestOutput:
        output, wanted = group.output(), group.request.params.prompt_logprobs
        if wanted is None:
            return output
        try:
            return dataclasses.replace(output, prompt_logprobs=self.score(group.request.token_ids, wanted))
        except FloatingPointError as error:  # of this prompt; the others' answers stand
            failed = {"finish_reason": "error", "error": str(error)}
            outputs = [dataclasses.replace(each, **failed) for each in output.outputs]
            return dataclasses.replace(output, outputs=outputs)

    def score(self, token_ids: Sequence[int], top: int = 0) -> list[dict[int, Logprob] | None]:
        """Log probabilities of a prompt's own tokens, and of the `top` likeliest at each place.

        A prompt's tokens stop at the split when it is served, so this is a computation of its own, through
        all layers: `forward`. One entry a token; None for the first, which nothing precedes.

        Raises:
          FloatingPointError: they are not finite.
        """
        word = self.tokenizer.decode if self.tokenizer else None
        limit, how = self.settings.max_model_len, self.settings.scoring
        return prompt_logprobs(self.model, self.params, token_ids, top, limit, word, how)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with the architecture, the plan, the dtype, or training."""
        model, leaves = self.model, jax.tree.leaves((self.params["norm"], self.params["fill"]))
        seen = [jax.device_get(leaf.ravel()[:64]).tobytes() for leaf in leaves]
        name = repr((model.config, model.plan, model.dtype)).encode()
        return hashlib.sha256(b"".join([name, *seen])).hexdigest()[:16]

    def _root(self, salt: str) -> bytes:
        return prefix.root(self.fingerprint, self.settings.cache_dtype, str(self.settings.page_size), salt)

    def _bad_ids(self, params: SamplingParams, where: str) -> tuple[tuple[int, ...], ...]:
        """Each bad word's tokens, at the beginning of a text and behind a space.

        A tokenizer may know more tokens than the model: a word that holds such a one is never generated.
        """
        found, vocab = {}, self.model.config.vocab_size
        for word in params.bad_words or ():
            for text in (word.lstrip(), " " + word.lstrip()):
                found[tuple(self._need_tokenizer(where).encode(text, add_special_tokens=False))] = None
        return tuple(ids for ids in found if ids and max(ids) < vocab)

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes one token takes in the cache: keys and values of every row of the plan, and their scales."""
        pool = jax.eval_shape(functools.partial(empty_pool, self.model, self.settings))
        return pool.bytes_per_token

    def _encode(self, prompt, where: str) -> tuple[str | None, list]:
        """(text, token ids) of any form of prompt."""
        if isinstance(prompt, Mapping):
            known = [key for key in ("prompt", "prompt_token_ids", "messages") if key in prompt]
            if len(known) != 1:
                raise UsageError(f"{where} must hold one of prompt, prompt_token_ids and messages")
            value = prompt[known[0]]
            if known[0] == "messages":
                return None, self._need_tokenizer(where).encode_chat(
                    _conversation(value, where), add_generation_prompt=True
                )
            if isinstance(value, str) != (known[0] == "prompt"):
                raise UsageError(f"{where}: {known[0]} has the wrong type, {type(value).__name__}")
            prompt = value
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer(where).encode(prompt) if prompt else []
        if isinstance(prompt, list | tuple):
            return None, list(prompt)
        raise UsageError(f"{where} must be a string or a list of token ids, not {type(prompt).__name__}")

    def _need_tokenizer(self, where: str):
        if self.tokenizer is None:
            raise UsageError(f"{where} is text, but this LLM has no tokenizer; give token ids")
        return self.tokenizer

    def _run_with_bar(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        from tqdm import tqdm

        outputs: dict[int, RequestOutput] = {}
        with tqdm(total=len(requests), desc="prompts", disable=not use_tqdm) as bar:
            for number, output in self.run(requests):
                outputs[number] = output
                bar.set_postfix_str(f"{self.stats['output_tokens_per_s']:.1f} output tok/s", refresh=False)
                bar.update()
        return [outputs[number] for number in range(len(requests))]


def _defaults(generation: GenerationDefaults) -> SamplingParams:
    """vLLM's reading of generation_config.json: its numbers count, whatever its `do_sample` says."""
    found = {name: getattr(generation, name) for name in _FROM_GENERATION}
    return SamplingParams(**{name: value for name, value in found.items() if value is not None})


def _context(config: ModelConfig, wanted: int | None) -> int:
    """The context limit in tokens; `dynamic` rotary scaling may be asked for more than it was trained on."""
    trained, rope = config.max_position_embeddings, config.rope
    most = int(trained * rope.factor) if rope.rope_type == "dynamic" else trained
    return integer("max_model_len", wanted, 1, most) if wanted is not None else trained


def _settings(limit: int, given: dict) -> Settings:
    """Engine settings of keyword arguments, each checked by name."""
    known = [field.name for field in dataclasses.fields(Settings) if field.name != "max_model_len"]
    for name, value in given.items():
        if name not in known:
            raise UsageError(f"unknown setting {name!r}{suggest(name, known)}")
        if name in _NOT_COUNTS:
            continue
        if value is not None:
            integer(name, value, 0 if name == "drafts" else 1)
    settings = Settings(max_model_len=limit, **given)
    if not 0 < settings.memory_fraction <= 1:
        raise UsageError(f"memory_fraction must be in (0, 1], not {settings.memory_fraction}")
    return settings


def _mesh_of(params: PyTree) -> Mesh | None:
    place = jax.tree.leaves(params)[0].sharding
    return place.mesh if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh) else None


def _is_one(prompts) -> bool:
    """Whether this is a single prompt: a string, a dict, or a list of numbers."""
    if isinstance(prompts, str | Mapping):
        return True
    return isinstance(prompts, list | tuple) and bool(prompts) and isinstance(prompts[0], int)


def _spread(params, count: int) -> list:
    if not isinstance(params, list | tuple):
        return [params] * count
    if len(params) != count:
        raise UsageError(f"{len(params)} sampling_params for {count} prompts; give one for all, or one each")
    return list(params)


def _conversation(messages, where: str) -> list[dict]:
    good = isinstance(messages, list) and bool(messages)
    if not good or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
        raise UsageError(f"{where}: messages must be a list of {{role, content}} objects, not empty")
    return [dict(message) for message in messages]
