"""NaN over HTTP is an error for its request only, and leaves nothing in the cache."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from http_server import Running, make_llm, unharmed, wait_for

from swiftkv_jax.engine.request import SamplingParams

WARM_UP = True


def tokens_of(prompts: list) -> list[list[int]]:
    """The model's answers, from a separate engine."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    return [output.outputs[0].token_ids for output in make_llm().generate(prompts, params, use_tqdm=False)]


def poison(server: Running, token: int) -> dict:
    """Parameters by which whoever reads this token computes NaN."""
    params = server.api.llm.params
    return params | {"embed": params["embed"].at[token].set(jnp.nan)}


@contextlib.contextmanager
def served_by(server: Running, params: dict):
    llm, machine = server.api.llm, server.engine.runner
    good = llm.params
    llm.params = machine.params = params
    try:
        yield
    finally:
        llm.params = machine.params = good


def text_of(server: Running, prompt, **fields) -> str:
    body = server.complete(prompt, max_tokens=24, ignore_eos=True, **fields)
    return body["choices"][0]["text"]


def corrupted(server: Running) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("swiftkv_corrupted_requests_t"))


def check_forgotten(server: Running, prompt: list[int], salt: str, want: str) -> None:
    """The same prompt finds none of its pages, is read anew, and its rows are whole this time."""
    for hits in (0, (len(prompt) - 1) // 8 * 8):
        before = server.engine.stats.prefix_hits
        assert text_of(server, prompt, cache_salt=salt) == want
        wait_for(server.idle)
        assert server.engine.stats.prefix_hits - before == hits
    cache = server.engine.runner.cache
    for pool in jax.tree.leaves(cache.stores):
        assert np.isfinite(np.asarray(pool)[:, 1:]).all(), "pages that others will get hold NaN"


def unused_token() -> int:
    """One that the canary does not read."""
    said = {*tokens_of(["canary"])[0], *b"canary"}
    return next(token for token in range(255, 0, -1) if token not in said)


@pytest.mark.parametrize("stream, n", [(True, 1), (False, 2)], ids=["streamed", "whole"])
def test_a_prompt_that_gives_nan_is_an_error_and_is_forgotten(served, stream, n):
    token = unused_token()
    prompt = [*range(60, 76), token, *range(60, 83)]  # 40: more than one launch reads
    want, failed = text_of(served, prompt, cache_salt="apart"), corrupted(served)
    bad = poison(served, token)
    body = {"prompt": prompt, "max_tokens": 4, "n": n, "stream": stream, "cache_salt": f"{n}{stream}"}

    def harm() -> None:
        with served_by(served, bad):
            for _ in range(3):
                answer = served.http.post("/v1/completions", json=body)
                assert answer.status_code == 500 and answer.headers["x-should-retry"] == "true"
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("server_error", "internal_error")

    unharmed(served, harm)
    assert 3 <= corrupted(served) - failed <= 3 * n  # when one has failed the other may not be waited for
    check_forgotten(served, prompt, body["cache_salt"], want)
