"""Encoders and the decoders that read them equal transformers' on the files it saved itself: full sequences,
steps over a cache in every form, and files out and in again."""

import dataclasses
import functools
from functools import partial

import encoder_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from swiftkv_jax.checkpoint.hf import from_pretrained, save_pretrained
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.core.cache import Cache, Sources
from swiftkv_jax.core.encoder import encode, fill
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.layers import relative_bias
from swiftkv_jax.core.loop import step
from swiftkv_jax.core.rows import rounded
from swiftkv_jax.core.scan import forward
from swiftkv_jax.core.surgery import hadamard_inputs, to_slim

LENGTHS = [13, 30, 5]
T5_CONFIG = {
    "family": "t5",
    "vocab_size": 9,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 8,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name: str):
        if name not in made:
            made[name] = encoder_models.save(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


def family_of(name: str) -> str:
    return encoder_models.CASES[name][0]


def definition(model, params, source, lengths, ids):
    """(the encoder's output, logits) by full sequences."""

    @jax.jit
    def both(params, source, lengths, ids):
        encoded = encode(model, params, source, lengths)
        return encoded.x, model.apply({"params": params}, ids, encoded)

    return both(params, *map(jnp.asarray, (source, lengths, ids)))


@pytest.mark.parametrize("name", encoder_models.CASES)
def test_encoder_and_logits_equal_transformers_before_and_after_a_round_trip(name, folders, tmp_path):
    """Ragged sources in one batch: what lies behind a source's end changes nothing."""
    source, lengths = encoder_models.sources(family_of(name), LENGTHS)
    ids = encoder_models.tokens(len(LENGTHS), 29)
    encoded, want = encoder_models.torch_logits(encoder_models.load(folders(name)), source, lengths, ids)
    assert want.std() > 1, "flat logits would hide errors"
    model, params = from_pretrained(folders(name))
    x, got = definition(model, params, source, lengths, ids)
    real = np.arange(x.shape[1]) < lengths[:, None]
    np.testing.assert_allclose(np.asarray(x)[real], encoded[real], atol=1e-4)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)

    save_pretrained(tmp_path / "ours", model, params)
    again = encoder_models.torch_logits(encoder_models.load(tmp_path / "ours"), source, lengths, ids)[1]
    np.testing.assert_allclose(again, want, rtol=0, atol=1e-5)


CHUNKS = (7, 1, 1, 7, 1)  # of two sizes, each of which is a program


def converted(folder, own: str, cross):
    model, params = from_pretrained(folder)
    if (own, cross) == ("kv", "kv"):
        return model, params
    cross = cross if isinstance(cross, str) else cross[: model.config.num_layers]
    return to_slim(model, params, own, cross_forms=cross)


def stepped(model, params, source, lengths, ids, dtype="float32", spoilt: bool = True):
    """Logits of all tokens, read in CHUNKS over a cache whose unused places hold NaN; and the cache."""
    count, total = ids.shape
    cache = Cache.dense(
        model.config, model.plan, count, total + 3, dtype, sources=source_positions(model, source)
    )
    if spoilt:
        cache = dataclasses.replace(
            cache, stores=nan(cache), cross=dataclasses.replace(cache.cross, stores=nan(cache.cross))
        )
    seen = Sources(cache.cross.table, jnp.asarray(lengths, jnp.int32))
    cache = jax.jit(partial(fill, model))(params, jnp.asarray(source), cache, seen).reading(seen)
    out, at, one = [], 0, jax.jit(partial(step, model))
    for size in CHUNKS:
        positions = jnp.tile(jnp.arange(at, at + size), count)
        starts, flat = jnp.arange(count + 1) * size, jnp.asarray(ids[:, at : at + size].reshape(-1))
        logits, cache = one(params, flat, positions, starts, jnp.arange(count * size), cache)
        out.append(np.asarray(logits).reshape(count, size, -1))
        at += size
    return np.concatenate(out, axis=1), cache


def source_positions(model, source) -> int:
    return source.shape[1] // (2 if model.config.encoder.mels else 1)


def nan(cache):
    return jax.tree.map(lambda x: x * jnp.nan, cache.stores)


@pytest.fixture(scope="module")
def wanted(folders):
    """name -> (source, lengths, tokens, transformers' logits)."""

    @functools.cache
    def one(name: str):
        source, lengths = encoder_models.sources(family_of(name), LENGTHS)
        ids = encoder_models.tokens(len(LENGTHS), sum(CHUNKS))
        theirs = encoder_models.load(folders(name))
        return source, lengths, ids, encoder_models.torch_logits(theirs, source, lengths, ids)[1]

    return one


# Model, form of tokens' rows, of sources'.
SELDOM = [
    ("t5", "kv", "kv"),
    ("t5", "v", "v"),
    ("whisper", "x", "x"),
    ("whisper", "k", "k"),
    ("t5_wide", "k", "k"),
]
CASES = [
    ("t5", "kv", "x"),
    ("t5", "x", "x"),
    ("t5", "k", "k"),
    ("t5_wide", "x", "x"),
    ("whisper", "kv", "kv"),
    ("whisper", "kv", "x"),
    ("whisper", "v", "v"),
    ("whisper", "kv", ["x", "kv", "x"]),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SELDOM),
]


@pytest.mark.slow("t5-k-k", "t5-x-x", "t5_wide-x-x", "whisper-kv-kv", "whisper-v-v", "whisper-kv-cross7")
@pytest.mark.parametrize("name, own, cross", CASES)
def test_steps_in_every_form_equal_transformers(name, own, cross, folders, wanted):
    source, lengths, ids, want = wanted(name)
    model, params = converted(folders(name), own, cross)
    got, cache = stepped(*hadamard_inputs(model, params), source, lengths, ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    np.testing.assert_allclose(definition(model, params, source, lengths, ids)[1], want, rtol=0, atol=1e-4)
    if cross == "x":  # one row of the encoder's output, whatever the layers
        assert cache.cross.bytes_per_token == 4 * model.config.hidden_size
    assert cache.cross.pages * cache.cross.page * cache.cross.bytes_per_token == cache.cross.nbytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, own, cross", [("t5", "kv", "kv"), pytest.param("whisper", "kv", "x", marks=pytest.mark.slow)]
)
def test_steps_over_eight_bit_rows_are_the_definition_with_rounded_rows(name, own, cross, folders, wanted):
    """Rows of sources are rounded too. A number may lie between two roundings: see tests/test_model.py."""
    source, lengths, ids, exact = wanted(name)
    model, params = hadamard_inputs(*converted(folders(name), own, cross))
    got, _ = stepped(model, params, source, lengths, ids, "float8_e4m3fn", spoilt=False)
    encoded = encode(model, params, jnp.asarray(source), jnp.asarray(lengths))
    store = partial(rounded, dtype="float8_e4m3fn")
    x = jax.jit(partial(forward, model, store=store))(params, jnp.asarray(ids), encoded=encoded)
    off = np.abs(got - logits(model, params, x)).max(-1)
    felt = np.abs(got - exact).max()
    assert felt > 1e-2 and np.median(off) < felt / 1000 and off.max() < felt / 20


@pytest.mark.parametrize("name, own, cross", [("t5_wide", "x", "x"), ("whisper", "k", ["x", "k", "x"])])
def test_converted_files_come_back_and_are_plain_models_to_others(name, own, cross, folders, tmp_path):
    model, params = converted(folders(name), own, cross)
    save_pretrained(tmp_path / "slim", model, params)
    again, read = from_pretrained(tmp_path / "slim")
    assert (again.config, again.plan) == (model.config, model.plan)
    jax.tree.map(np.testing.assert_array_equal, read, params)
    plain, read = from_pretrained(tmp_path / "slim", slim=False)
    original, params = from_pretrained(folders(name))
    assert plain.plan == original.plan
    jax.tree.map(np.testing.assert_array_equal, read, params)
    source, lengths = encoder_models.sources(family_of(name), LENGTHS)
    ids = encoder_models.tokens(len(LENGTHS))
    theirs = [encoder_models.load(folder) for folder in (folders(name), tmp_path / "slim")]
    want, got = (encoder_models.torch_logits(model, source, lengths, ids)[1] for model in theirs)
    np.testing.assert_array_equal(got, want)


def test_distances_fall_into_the_ranges_of_transformers():
    """All of them, up to far beyond the last border: borders are whole distances, where rounding decides."""
    ahead = np.arange(-700, 701)
    bucket = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    for buckets, furthest in ((32, 128), (8, 20), (64, 256), (10, 33)):
        for both in (False, True):
            config = T5_CONFIG | {"relative_buckets": buckets, "relative_distance": furthest}
            table = jnp.arange(buckets, dtype=jnp.float32)[:, None]
            got = relative_bias(ModelConfig(**config, bidirectional=both), table, ahead)[0]
            want = bucket(torch.tensor(ahead), both, buckets, furthest)
            np.testing.assert_array_equal(got, want.numpy())
