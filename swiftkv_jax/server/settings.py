"""The limits of the HTTP server, as one frozen value."""

import dataclasses
from typing import Annotated

from swiftkv_jax.common.checks import Checked, one_of

TELL_S = 2.0  # seconds between progress lines while a server starts
REFUSALS = (429, 503, 529)  # statuses after which clients wait and retry


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpSettings(Checked):
    """Limits of the server; seconds and bytes.

    Attributes:
      model_name: what `/v1/models` lists and requests may name.
      api_keys: any one of them opens every route; none: no key is asked for.
      metrics_key: opens `/metrics`, and nothing else. None: one key opens it too, one of several does not.
      max_body_bytes, max_body_chunks, body_timeout_s: of one request's body. max_audio_bytes: of one with
        audio.
      max_headers, max_header_bytes, header_timeout_s: of one request's head.
      max_connections: open at once. max_requests_per_key: running or waiting, each completion counted; None:
        with two keys or more, half of all places, else no cap.
      max_queued_requests, max_queued_tokens, max_queued_output_tokens: completions that may wait, tokens of
        their prompts, and tokens that they may generate. None: 64 full steps, or four contexts if that is
        more; and 64 contexts.
      queue_status, key_status: of the refusal when the queue is full, and when a key has used its share.
      linger_s: how long a client may keep sending, unread, after its incomplete request was refused.
      write_timeout_s: a client that does not read its answer for so long is cut off.
      queue_timeout_s: a request that has no place in the batch by then is refused.
      heartbeat_s: an engine silent for longer is unhealthy; one silent for longer than `give_up_s` ends the
        process. While it may be compiling, warming up or without having warmed up, either takes
        `warm_up_heartbeat_s`.
      shutdown_s: time that running requests get when the server is told to stop.
      max_prompts, max_n, max_sequences: of one request; sequences are prompts times n.
      max_scored_tokens: longest prompt whose own log probabilities may be asked for.
      warm_up: compile what any request needs before the first one, and the rest in the background.
      show_template: whether `/tokenizer_info` gives the chat template.
      metrics_prefix: of every metric's name.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    metrics_key: str | None = None
    max_body_bytes: int = 2 * 2**20
    max_audio_bytes: int = 25 * 2**20  # OpenAI's own bound
    max_body_chunks: int = 8192
    body_timeout_s: float = 10.0
    max_headers: int = 64
    max_header_bytes: int = 16 * 2**10
    header_timeout_s: float = 10.0
    max_connections: int = 1024
    max_requests_per_key: int | None = None
    max_queued_requests: int = 256
    max_queued_tokens: int | None = None
    max_queued_output_tokens: int | None = None
    queue_status: Annotated[int, one_of(*REFUSALS)] = 503
    key_status: Annotated[int, one_of(*REFUSALS)] = 429
    linger_s: float = 5.0
    write_timeout_s: float = 30.0
    queue_timeout_s: float = 120.0
    heartbeat_s: float = 10.0
    give_up_s: float = 300.0
    warm_up_heartbeat_s: float = 1800.0
    shutdown_s: float = 30.0
    max_prompts: int = 128
    max_n: int = 16
    max_sequences: int = 128
    max_scored_tokens: int = 4096
    warm_up: bool = True
    show_template: bool = False
    metrics_prefix: str = "swiftkv_"
