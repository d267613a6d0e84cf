"""`LLM`: a checkpoint and a list of prompts in, completions out, as in vLLM."""

import contextlib
import copy
import dataclasses
import functools
import threading
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from swiftkv_jax.checkpoint.adapter import from_pretrained, local_folder
from swiftkv_jax.checkpoint.generation import GenerationDefaults, read_generation_config
from swiftkv_jax.common.checks import flag, integer
from swiftkv_jax.common.errors import UsageError, UsageWarning
from swiftkv_jax.core.layers import by_token
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted, for_mesh, for_serving, tail_of, transformers
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.core.sharding import tensor_mesh
from swiftkv_jax.core.surgery import fold_shared_norm
from swiftkv_jax.engine import speech
from swiftkv_jax.engine.engine import Engine, Group
from swiftkv_jax.engine.followers import Follower, repeated, role_in
from swiftkv_jax.engine.kernels import Choice, choose, in_force
from swiftkv_jax.engine.pages import root
from swiftkv_jax.engine.request import (
    MAX_LOGPROBS,
    Logprob,
    Request,
    RequestOutput,
    SamplingParams,
    bad_word_ids,
    encode,
    is_one,
    special_stops,
)
from swiftkv_jax.engine.runner import fingerprint, working_bytes
from swiftkv_jax.engine.score import TOGETHER, prompt_logprobs, scores
from swiftkv_jax.engine.settings import Settings, check_fill, empty_pools, resolve
from swiftkv_jax.engine.speech import Transcription
from swiftkv_jax.engine.validate import (
    check_ids,
    check_names,
    choose_kernels,
    computed_in,
    context,
    for_encoder,
    mesh_of,
    parts_of,
    room_for,
    sampling_defaults,
    settings_of,
)
from swiftkv_jax.text.tokenizer import has_tokenizer, load_tokenizer


class LLM:
    """A model ready to generate: an engine with continuous batching, for all checkpoints of this library.

    With `dynamic` or `longrope` RoPE scaling, the frequencies are those of `max_model_len` for every request.

    Attributes:
      model, params, tokenizer: what it runs. Inputs (form "x") are in the basis in which they are stored;
        params are split by layer, and folded for a fused fill.
      settings: the `engine.Settings` in use. defaults: the SamplingParams used when a call gives none.
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
        revision: str | None = None,
        tensor_parallel_size: int = 1,
        slim: bool = True,
        base: str | Path | None = None,
        quantization: str | None = "auto",
        eight_bit_activations: bool = False,
        **settings,
    ):
        """Load a model and start its engine.

        Args:
          path_or_id: a folder, a GGUF file, an adapter's folder, or a hub id.
          dtype: of weights and activations; "auto": the checkpoint's, or another (and a UsageWarning) if this
            machine does not compute in it, or on a CPU float32, see `validate.usual_dtype`.
          max_model_len: context length in tokens; None: the model's.
          tokenizer: another folder, or an object with the tokenizer's methods; None: the model's. Without any
            (a warning), prompts must be token ids, and texts are empty.
          mesh: the devices to shard over, by the axes `fsdp` and `tensor`; None: see `tensor_parallel_size`.
          seed: the first of the counter that gives seeds to requests without one.
          revision: branch, tag or commit of a hub model.
          tensor_parallel_size: number of devices to split the heads over. It divides the number of kv heads,
            or is a multiple of it; then kv heads are repeated.
          slim: False loads a Slim attention checkpoint as the plain model.
          base: an adapter's base model, if it is not where the adapter says.
          quantization: "auto" (as stored), "int8", "fp8" or "dequantize", as in `from_pretrained`.
          eight_bit_activations: round what 8-bit weights are multiplied with to 8 bits too, with a scale for
            each token: for chips with such products (int8 on TPUs, fp8 on Hopper).
          **settings: the other fields of `engine.Settings`: max_num_seqs, num_pages, cache_dtype, ...

        Raises:
          UsageError: the checkpoint or the tokenizer cannot be read, or a setting is invalid.
        """
        folder = local_folder(path_or_id, revision)
        dtype = computed_in(folder, dtype, slim, base)
        sizes = dtype, max_model_len, parts_of(mesh) if mesh else tensor_parallel_size
        chosen = choose_kernels(folder, *sizes, slim=slim, base=base, **settings)  # before JAX has devices
        if tensor_parallel_size != 1 and mesh is None:
            mesh = tensor_mesh(tensor_parallel_size)
        options = {"base": base, "slim": slim, "quantization": quantization}
        model, params = from_pretrained(folder, dtype, mesh, cuts=None, **options)
        model, params = for_serving(model, params)  # here, so that the first weights are freed
        params = by_token(params) if flag("eight_bit_activations", eight_bit_activations) else params
        check_fill(model, **settings)
        if tokenizer is None and not has_tokenizer(folder):
            message = f"no tokenizer in {folder}: prompts must be token ids, and answers are without text"
            warnings.warn(message, UsageWarning, stacklevel=2)
        elif tokenizer is None or isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(tokenizer or folder)
        generation = read_generation_config(folder)
        self._set(model, params, tokenizer, generation, mesh, seed, max_model_len, chosen)

    @classmethod
    def from_model(
        cls,
        model: Transformer | Predicted,
        params: PyTree,
        tokenizer=None,
        *,
        generation: GenerationDefaults | None = None,
        max_model_len: int | None = None,
        mesh: Mesh | None = None,
        seed: int = 0,
        **settings,
    ) -> "LLM":
        """An LLM of a model in memory. Without a tokenizer prompts must be token ids, and texts are empty.

        `mesh` is taken from the parameters when they are on one.
        """
        llm, mesh, generation = cls.__new__(cls), mesh or mesh_of(params), generation or GenerationDefaults()
        sizes = settings_of(context(model.config, max_model_len), settings)
        check_fill(model, **settings)
        chosen = choose(model.config, model.plan, model.dtype, sizes, parts_of(mesh))
        model, params = for_serving(model, params)
        llm._set(model, params, tokenizer, generation, mesh, seed, max_model_len, chosen)
        return llm

    def _set(self, model, params, tokenizer, generation, mesh, seed, max_model_len, chosen: Choice):
        self.tokenizer, self.mesh, self.generation = tokenizer, mesh, generation
        if mesh is not None and mesh.size > 1 and model.config.encoder is not None:
            raise UsageError(f"{model.config.family} has an encoder: such models run on one device")
        if mesh is not None:
            model, params = for_mesh(model, params, mesh)
        self.model, self.params = model, params
        # Ids that every part of the model knows: paddings of a vocabulary may differ.
        self.vocab_size = min(part.config.vocab_size for part in transformers(model))
        self.role, self._engine = role_in(self.mesh), None
        self._kernels_from = chosen.how
        self._resolve(dataclasses.replace(chosen.settings, max_model_len=self._context(max_model_len)))
        self.defaults = sampling_defaults(generation)
        self.eos_ids = tuple(sorted({*generation.eos_token_ids, *(tokenizer.eos_ids if tokenizer else ())}))
        self.stats: dict[str, int | float] = {}
        self._next_seed, self._next_id = integer("seed", seed, 0), 0
        # A server makes requests on several threads, and asks for the engine on more than one.
        self._numbering, self._making = threading.Lock(), threading.Lock()
        if self.role.several:  # a program of all processes: it must run where all of them are
            _ = self.fingerprint

    def _context(self, wanted: int | None) -> int:
        """The context limit in tokens: `wanted`, or the longest that every model supports."""
        whose = ("", ", by the auxiliary's context,")
        parts = zip(transformers(self.model), whose, strict=False)
        return min(context(part.config, wanted, who) for part, who in parts)

    def _resolve(self, settings: Settings):
        working = functools.partial(working_bytes, self.model, self.params, self.mesh)
        self._num_pages = settings.num_pages  # as asked for; `resolve` computes what None stands for
        self.settings = resolve(settings, self.model, self.devices, self.mesh, working)
        if "fill" in self.settings.implementations:  # here, not in the engine: scoring uses these too
            if isinstance(self.model, Predicted):
                base = fold_shared_norm(self.model.base, self.params["base"])
                self.params = self.params | {"base": base}
            else:
                self.params = fold_shared_norm(self.model, self.params)

    def replace(self, defaults: SamplingParams | None = None, **settings) -> "LLM":
        """Return another LLM on the same weights, with its own engine and some settings changed.

        Raises:
          UsageError: a setting is invalid.
        """
        other = copy.copy(self)
        other._engine = None
        other.defaults = defaults or self.defaults
        check_names(settings)
        wanted = dataclasses.replace(self.settings, **settings)
        if settings and "num_pages" not in settings:
            wanted = dataclasses.replace(wanted, num_pages=self._num_pages)
        check_fill(self.model, **settings)
        if "max_model_len" in settings:
            wanted = dataclasses.replace(wanted, max_model_len=self._context(settings["max_model_len"]))
        if "kernels" in settings:  # the earlier choice is dropped
            model = self.model
            chosen = choose(model.config, model.plan, model.dtype, wanted, parts_of(self.mesh))
            wanted, other._kernels_from = chosen.settings, chosen.how
        other.role = role_in(self.mesh)
        other._resolve(wanted)
        return other

    @property
    def kernels(self) -> dict[str, str]:
        """The implementation of each kind of call, where one is chosen (decode, chunk, fill, write, scoring),
        and `how` they were chosen."""
        model, mesh = self.model, self.mesh
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if mesh else contextlib.nullcontext():
            names = in_force(model.config, model.plan, model.dtype, self.settings, parts_of(mesh))
        return names | {"how": self._kernels_from}

    @property
    def devices(self) -> list:
        """The devices that hold the weights, in order."""
        return sorted(jax.tree.leaves(self.params)[0].devices(), key=lambda device: device.id)

    @property
    def engine(self) -> Engine:
        """The only engine of this LLM; its cache persists between calls."""
        with self._making:
            if self._engine is None:
                self._make_engine()
        assert self._engine is not None
        return self._engine

    @repeated
    def _make_engine(self) -> None:
        parts = self.mesh, self.tokenizer, self.settings, self.role
        self._engine = Engine(self.model, self.params, *parts)

    def follow(self) -> None:
        """Repeat what process 0 makes this LLM do, until it calls `dismiss`: for every other process whose
        devices hold a part of the model.

        Raises:
          UsageError: this is process 0, or all of the model is on this process's devices.
        """
        if not isinstance(self.role, Follower):
            raise UsageError("follow() is for a model's processes other than the first")
        for name, args in self.role.messages():
            getattr(self if hasattr(self, name) else self.engine.runner, name)(*args)

    def dismiss(self) -> None:
        """Make `follow` return in the other processes; for process 0, when this LLM is no longer needed."""
        self.role.dismiss()

    @typing.no_type_check  # user input: checked below, by name
    def generate(
        self,
        prompts,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; the answers are in the prompts' order.

        Args:
          prompts: each a str, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}; a text may
            have {"add_special_tokens": False} beside it. If the model has an encoder (T5), the encoder reads
            the prompt, and {"decoder_prompt": ...}, a text or token ids, may be given beside it.
          sampling_params: for all, or one for each prompt; `self.defaults` when None.
          use_tqdm: show a progress bar on stderr.

        Raises:
          UsageError: a prompt or parameter is invalid. It is raised before anything runs, and names which.
        """
        from tqdm import tqdm

        prompts = [prompts] if is_one(prompts) else prompts
        if not isinstance(prompts, list | tuple):
            raise UsageError(f"prompts must be a string or a list, not {type(prompts).__name__}")
        shared = not isinstance(sampling_params, list | tuple)
        params = [sampling_params] * len(prompts) if shared else sampling_params
        if len(params) != len(prompts):
            raise UsageError(
                f"{len(params)} sampling_params for {len(prompts)} prompts: give one, or as many"
            )
        pairs = enumerate(zip(prompts, params, strict=True))
        requests = [self.request(prompt, p, f"prompts[{i}]") for i, (prompt, p) in pairs]
        outputs: dict[int, RequestOutput] = {}
        with tqdm(total=len(requests), desc="prompts", disable=not use_tqdm) as bar:
            for number, output in self.run(requests):
                outputs[number] = output
                bar.set_postfix_str(f"{self.stats['output_tokens_per_s']:.1f} output tok/s", refresh=False)
                bar.update()
        return [outputs[number] for number in range(len(requests))]

    @typing.no_type_check
    def transcribe(
        self,
        audio,
        language: str | None = None,
        task: str = "transcribe",
        sampling_params: SamplingParams | None = None,
    ) -> Transcription | list[Transcription]:
        """Transcribe one audio input, or each of a list, with a Whisper model.

        Args:
          audio: the path of a wav file, its bytes, or (samples, their rate).
          language: such as "en"; None: the one detected in the first 30 s.
          task: "transcribe", or "translate" to English.
          sampling_params: of each window of 30 s; None: greedy, until the model ends.

        Raises:
          UsageError: no audio, an unknown language or task, or another kind of model.
          SpeechError: the model failed on a window; its `transcriptions` are those of all inputs.
        """
        single = not isinstance(audio, list)
        transcriptions = speech.transcribe(
            self, [audio] if single else audio, language, task, sampling_params
        )
        return transcriptions[0] if single else transcriptions

    @typing.no_type_check
    def chat(
        self,
        messages,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, with the model's chat template.

        Args:
          messages: a list of {"role", "content"}, or a list of such lists.
          sampling_params: for all, or one for each conversation; `self.defaults` when None.
          use_tqdm: show a progress bar on stderr.

        Raises:
          UsageError: there is no chat template, or it refuses the messages; as `generate`.
        """
        single = isinstance(messages, list) and bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if single else messages
        if not isinstance(conversations, list | tuple):
            raise UsageError(f"messages must be a list, not {type(messages).__name__}")
        prompts = [{"messages": conversation} for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    @typing.no_type_check
    def request(
        self, prompt, params: SamplingParams | None = None, where: str = "prompt", salt: str = ""
    ) -> Request:
        """Check one prompt and make its request; error messages begin with `where`.

        Only requests with the same `salt` share cached prefixes.

        Raises:
          UsageError: no tokens, wrong types, ids out of range, or longer than the context.
        """
        encoder = self.model.config.encoder
        if encoder is not None and encoder.mels:
            raise UsageError(f"{where} is text, and {encoder.family} takes audio: pass it to transcribe")
        if encoder is None and isinstance(prompt, Mapping) and "decoder_prompt" in prompt:
            family = self.model.config.family
            raise UsageError(f"{where}: decoder_prompt has no place, as {family} has no encoder")
        text, ids = encode(self.tokenizer, prompt, where)
        if not ids:
            raise UsageError(f"{where} is empty; give at least one token")
        check_ids("token", ids, self.vocab_size, where)
        if encoder is None:
            return self.make_request(text, ids, params, where, salt)
        begun, read = for_encoder(self, prompt, ids, where)
        return self.make_request(text, begun, params, where, salt, **read)

    @typing.no_type_check
    def make_request(self, text, ids, params, where: str, salt: str = "", **read) -> Request:
        """The request of a prompt's `ids`, with `max_tokens` and `seed` set; `read`: its other fields."""
        params = self.defaults if params is None else params
        if not isinstance(params, SamplingParams):
            raise UsageError(f"{where}: sampling_params must be SamplingParams, not {type(params).__name__}")
        room = room_for(self, ids, params, where)
        if params.prompt_logprobs is not None and not self.scorable:
            why = "not with an encoder, and with an auxiliary only for a tail of 1 token"
            raise UsageError(f"{where}: prompt_logprobs are not offered here: {why}")
        tail = tail_of(self.model)
        ahead = max(0, len(ids) - tail) if tail else None
        resolved = {"max_tokens": params.max_tokens or room}
        with self._numbering:
            if params.seed is None:
                resolved["seed"], self._next_seed = self._next_seed, self._next_seed + params.n
            self._next_id += 1
            number = self._next_id
        params = dataclasses.replace(params, **resolved)
        eos = () if params.ignore_eos else tuple(i for i in self.eos_ids if i < self.vocab_size)
        # A tokenizer may know more tokens than the model.
        suppressed = read.pop("bad_ids", ())
        bad, vocab = bad_word_ids(self.tokenizer, params.bad_words, where), self.model.config.vocab_size
        return Request(
            prompt=text,
            token_ids=tuple(ids),
            params=params,
            eos_ids=eos,
            **special_stops(self.tokenizer, params.stop, vocab),
            bad_ids=tuple(ids for ids in [*bad, *suppressed] if max(ids) < vocab),  # others never occur
            root=root(self.fingerprint, self.settings.cache_dtype, str(self.settings.page_size), salt),
            request_id=str(number),
            ahead=ahead,
            **read,
        )

    def run(self, requests: list[Request]) -> Iterator[tuple[int, RequestOutput]]:
        """Yield (number, output) of each request as it finishes; `stats` cover this call up to then.

        Requests that have not finished when the caller stops or fails are aborted.

        Raises:
          UsageError: another call is still running; `replace()` gives another engine on the same weights.
        """
        numbers = {request.request_id: number for number, request in enumerate(requests)}
        if not requests:
            return
        engine = self.engine
        if engine.groups:
            raise UsageError("another call of this LLM is running: finish it, or use llm.replace()")
        engine.count_anew()
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
        except FloatingPointError as error:  # of this prompt only
            failed = {"finish_reason": "error", "error": str(error)}
            outputs = [dataclasses.replace(each, **failed) for each in output.outputs]
            return dataclasses.replace(output, outputs=outputs)

    def score(self, token_ids: Sequence[int], top: int = 0) -> list[dict[int, Logprob] | None]:
        """Log probabilities of a prompt's own tokens, and of the `top` most likely ones at each position.

        When a prompt is served, its tokens stop at the split. Scoring is therefore a separate pass through
        all layers, `forward` over rows rounded as in the cache. The result has one entry per token; the first
        is None, as nothing precedes it.

        Raises:
          UsageError: there are no tokens or too many, or the model has no such id.
          FloatingPointError: the log probabilities are not finite.
        """
        return self._scored([token_ids], top, MAX_LOGPROBS)[0]  # one program, whatever a server is asked

    def score_each(
        self, texts: Sequence[Sequence[int]], top: int = 0
    ) -> list[list[dict[int, Logprob] | None]]:
        """`score` of several texts; short ones share a pass, unless `kernels` names an implementation of
        scoring, which may not support that."""
        return self._scored(texts, top, top and MAX_LOGPROBS)

    def _scored(self, texts: Sequence[Sequence[int]], top: int, computed: int):
        for token_ids in texts:
            if not token_ids:
                raise UsageError("there are no tokens to score")
            check_ids("token", token_ids, self.vocab_size, "score")
        together = 1 if "scoring" in self.settings.implementations else TOGETHER
        limit = self.settings.max_model_len
        read = functools.partial(self._scores, computed)
        return prompt_logprobs(texts, top, limit, self.tokenizer, read, together)

    @repeated
    def _scores(self, top: int, tokens, following, places, segments):
        s = self.settings
        cache = s.max_model_len, s.cache_dtype, s.implementations.get("scoring"), top
        return scores(self.model, *cache, self.params, tokens, following, places, segments, mesh=self.mesh)

    @property
    def scorable(self) -> bool:
        """Whether `score` is available: not with an encoder, and under KV prediction only if the base model
        reads a single token of a prompt."""
        if isinstance(self.model, Predicted):
            return self.model.prediction.tail == 1
        return self.model.config.encoder is None

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash that changes with the architecture, the plan, the dtype, or training."""
        return fingerprint(self.model, self.params, self.mesh)

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes one token takes in the cache: keys and values of every row of the plan, and their scales."""
        return sum(self.pool_bytes_per_token)

    @property
    def pool_bytes_per_token(self) -> tuple[int, ...]:
        """`cache_bytes_per_token` by pool: the model's, then an auxiliary's."""
        pools = jax.eval_shape(functools.partial(empty_pools, self.model, self.settings))
        return tuple(pool.bytes_per_token for pool in pools)
