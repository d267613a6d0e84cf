"""Checkpoints with 8-bit weights in every published format: read exactly, kept or dequantised, written, and
refused in one line."""

import json
from pathlib import Path

import encoder_models
import hf_models
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import tiny_engine
import torch
import transformers
from safetensors.torch import load_file, save_file

from swiftkv_jax.checkpoint.adapter import from_pretrained, save_pretrained
from swiftkv_jax.checkpoint.eight_bit import Packed, quantised
from swiftkv_jax.cli.answering import in_dtype
from swiftkv_jax.common.errors import UsageError, UsageWarning
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.core.layers import dequantised, kernel_of
from swiftkv_jax.core.surgery import to_slim, to_swiftkv
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # transformers' own
E4M3 = torch.float8_e4m3fn
BLOCK = (32, 16)  # the first does not divide all sizes
EVEN = (16, 16)  # as transformers needs it
GROUP = {"num_bits": 8, "symmetric": True, "dynamic": False}


def compressed(kind: str, strategy: str, **more) -> dict:
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "model.layers.0.mlp.down_proj", "re:.*layers.3.self_attn.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": GROUP | {"type": kind, "strategy": strategy} | more,
            }
        },
    }


# name -> (quantization_config, dtype of q, the shape of scales, their name and dtype, other tensors)
FORMATS = {
    "fp8": ({"quant_method": "fp8"}, E4M3, "tensor", "weight_scale", torch.float32),
    "fp8_blocks": (
        {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"},
        E4M3,
        "block",
        "weight_scale_inv",
        torch.float32,
    ),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, E4M3, "channel", "weight_scale", torch.float32),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        E4M3,
        "number",
        "weight_scale",
        torch.float32,
    ),
    "float_tensor": (compressed("float", "tensor"), E4M3, "tensor", "weight_scale", torch.bfloat16),
    "float_channel": (compressed("float", "channel"), E4M3, "channel", "weight_scale", torch.bfloat16),
    "float_block": (
        compressed("float", "block", block_structure=list(BLOCK)),
        E4M3,
        "block",
        "weight_scale",
        torch.bfloat16,
    ),
    "int_tensor": (compressed("int", "tensor"), torch.int8, "tensor", "weight_scale", torch.bfloat16),
    "int_channel": (compressed("int", "channel"), torch.int8, "channel", "weight_scale", torch.bfloat16),
    "int_group": (
        compressed("int", "group", group_size=16),
        torch.int8,
        "group",
        "weight_scale",
        torch.bfloat16,
    ),
}
KEPT = [name for name, made in FORMATS.items() if made[2] not in ("block", "group")]
LISTED = ("lm_head", "model.layers.0.mlp.down_proj", "layers.3.self_attn")


def scale_of(w: torch.Tensor, shape: str, most: float, block: tuple[int, int]) -> torch.Tensor:
    """The scales of a weight [outputs, inputs], in the shape that files have."""
    if shape in ("block", "group"):
        rows, columns = block if shape == "block" else (1, 16)
        down, right = -(-w.shape[0] // rows), -(-w.shape[1] // columns)
        padded = torch.zeros(down * rows, right * columns)
        padded[: w.shape[0], : w.shape[1]] = w
        return padded.reshape(down, rows, right, columns).abs().amax((1, 3)) / most
    peak = w.abs().amax(1, keepdim=True) / most
    return {"channel": peak, "tensor": peak.max().reshape(1), "number": peak.max()}[shape]


def whole(s: torch.Tensor, shape: str, like: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The scale of each number of a weight."""
    if shape in ("block", "group"):
        rows, columns = block if shape == "block" else (1, 16)
        s = s.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return s[: like.shape[0], : like.shape[1]]
    return s.expand(like.shape)


def written(
    folder: Path, name: str, family: str = "llama2", block: tuple[int, int] = BLOCK
) -> tuple[Path, Path]:
    """(a checkpoint in a format, the same numbers q * s in float32)."""
    said, dtype, shape, suffix, of_scale = FORMATS[name]
    dense = hf_models.save(hf_models.make(family), folder / "dense")
    tensors, wide = load_file(dense / "model.safetensors"), {}
    out = {}
    for key, w in tensors.items():
        linear = key.endswith("_proj.weight")
        if not linear or any(part in key for part in LISTED):
            out[key] = wide[key] = w
            continue
        most = 127 if dtype is torch.int8 else 448
        s = scale_of(w, shape, most, block).to(of_scale)
        q = w / whole(s.float(), shape, w, block)
        q = q.round().clamp(-127, 127).to(dtype) if dtype is torch.int8 else q.clamp(-448, 448).to(dtype)
        out[key], out[key.replace("weight", suffix)] = q, s
        wide[key] = q.float() * whole(s.float(), shape, w, block)
        if name in ("fbgemm_fp8", "modelopt"):
            out[key.replace("weight", "input_scale")] = torch.tensor(1.0)
    said = json.loads(json.dumps(said).replace(json.dumps(BLOCK), json.dumps(block)))
    folder = folder / name
    folder.mkdir()
    config = json.loads((dense / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    save_file(out, folder / "model.safetensors", {"format": "pt"})
    save_file(wide, dense / "model.safetensors", {"format": "pt"})
    return folder, dense


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def kernels(params) -> list[dict]:
    is_part = lambda part: isinstance(part, dict) and "kernel" in part  # noqa: E731
    return [part for part in jax.tree.leaves(params, is_leaf=is_part) if is_part(part)]


@pytest.mark.filterwarnings("ignore:.*scales of blocks:swiftkv_jax.common.errors.UsageWarning")
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_q_times_s(name, tmp_path):
    """In the stacks of serving and of training; the file's own list decides what is in 8 bits."""
    folder, dense = written(tmp_path, name)
    for cuts, starts in ((None, [0, 1, 2, 3]), ((), [0, 1, 3] if name in KEPT else [0])):
        _, got = from_pretrained(folder, "float32", cuts=cuts)
        stored = [part for part in kernels(got) if "scale" in part]
        assert bool(stored) == (name in KEPT) and len(stored) < len(kernels(got))
        assert all(part["kernel"].dtype.itemsize == 1 for part in stored)
        assert weights.cuts_of(got) == starts, "also where the dtypes of kernels change"
        _, want = from_pretrained(dense, "float32", cuts=starts)
        assert_same(dequantised(got, jnp.float32), want)
        assert_same(from_pretrained(folder, "float32", cuts=starts, quantization="dequantize")[1], want)


@pytest.mark.parametrize(
    "name", ["fp8_blocks", "float_block", "float_channel", "float_tensor", "int_channel"]
)
def test_transformers_reads_the_same_numbers(name, tmp_path):
    """After rounding to bfloat16, in which compressed-tensors multiplies."""
    pytest.importorskip("accelerate")
    pytest.importorskip("compressed_tensors")
    folder, _ = written(tmp_path, name, block=EVEN)
    how = transformers.CompressedTensorsConfig(dequantize=True) if name != "fp8_blocks" else None
    options = {"quantization_config": how} if how else {}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    model, params = from_pretrained(folder, "bfloat16", quantization="dequantize")
    save_pretrained(tmp_path / "ours", model, params)
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    for key, w in theirs.state_dict().items():
        torch.testing.assert_close(w, ours[key], rtol=0, atol=0)


MXFP4 = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "dynamic": False,
                "strategy": "group",
                "group_size": 32,
                "scale_dtype": "torch.uint8",
            },
        }
    },
}


def test_mxfp4_is_dequantised(tmp_path):
    """A sign, two bits of exponent, one of fraction; groups of 32 inputs share a power of two."""
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = torch.tensor(numbers + [-x for x in numbers])
    model = hf_models.build("llama", hidden_size=64, intermediate_size=96)
    dense = hf_models.save(model, tmp_path / "dense")
    random, tensors, out = torch.Generator().manual_seed(0), load_file(dense / "model.safetensors"), {}
    for key, w in tensors.items():
        out[key] = w
        if key.endswith("_proj.weight"):
            codes = torch.randint(16, w.shape, generator=random).to(torch.uint8)
            exponents = torch.randint(120, 126, (w.shape[0], w.shape[1] // 32), generator=random)
            del out[key]
            out[f"{key}_packed"] = codes[:, ::2] | codes[:, 1::2] << 4
            out[f"{key}_scale"] = exponents.to(torch.uint8)
            tensors[key] = table[codes.long()] * 2.0 ** (exponents - 127).repeat_interleave(32, 1)
    (tmp_path / "mxfp4").mkdir()
    raw = json.loads((dense / "config.json").read_text()) | {"quantization_config": MXFP4}
    (tmp_path / "mxfp4" / "config.json").write_text(json.dumps(raw))
    save_file(out, tmp_path / "mxfp4" / "model.safetensors", {"format": "pt"})
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    with pytest.warns(UsageWarning, match="28 weights with scales of blocks"):
        _, got = from_pretrained(tmp_path / "mxfp4", "float32")
    assert_same(got, from_pretrained(dense, "float32")[1])
    key = "model.layers.0.mlp.up_proj.weight"
    with safetensors.safe_open(tmp_path / "mxfp4" / "model.safetensors", framework="numpy") as file:
        part = Packed(key, dense, *(file.get_slice(f"{key}_{name}") for name in ("packed", "scale")))[
            3:7, 5:38
        ]
    np.testing.assert_array_equal(part, tensors[key][3:7, 5:38])


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.009), ("float8_e4m3fn", 0.028)])
def test_errors_of_gaussian_weights(dtype, bound):
    """Relative, in the Frobenius norm; scales are bfloat16's, and no number of a column exceeds the range."""
    w = np.random.default_rng(0).standard_normal((512, 96)).astype(np.float32)
    w[:, 3] = 0
    q, s = quantised(w, dtype, "w")
    assert q.dtype == jnp.dtype(dtype) and s.shape == (96,)
    assert np.linalg.norm(q.astype(np.float32) * s - w) <= bound * np.linalg.norm(w)
    np.testing.assert_array_equal(s, s.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert not q[:, 3].astype(np.float32).any()


@pytest.mark.parametrize(
    "family, quantization",
    [("llama_biases", "int8"), ("phi3", "fp8"), ("gemma2_biases", "int8"), ("opt", "fp8"), ("gpt2", "int8")],
)
def test_files_written_in_8_bits(family, quantization, tmp_path):
    """They are read again as they are; transformers reads the same numbers, q * s in float32."""
    dense = hf_models.save(hf_models.make(family), tmp_path / "dense")
    model, params = from_pretrained(dense, "float32", cuts=None, quantization=quantization)
    assert all("scale" in part for part in kernels(params))
    save_pretrained(tmp_path / "out", model, params)
    again, read = from_pretrained(tmp_path / "out", cuts=None)
    assert again.dtype == "float32"
    wide = dequantised(params, jnp.float32)
    if family == "gpt2":  # its Conv1D is no Linear: written in the model's dtype
        return assert_same(read, wide)
    assert_same(read, params)
    pytest.importorskip("accelerate")
    pytest.importorskip("compressed_tensors")
    save_pretrained(tmp_path / "wide", model, wide)
    how = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = hf_models.load(tmp_path / "out", dtype=torch.float32, quantization_config=how)
    linear = {name for name, part in theirs.named_modules() if isinstance(part, torch.nn.Linear)}
    ignored = set(json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"])
    assert linear & ignored == {"lm_head"}, "all others are in 8 bits"
    theirs = theirs.state_dict()
    for key, w in load_file(tmp_path / "wide" / "model.safetensors").items():
        torch.testing.assert_close(theirs[key], w, rtol=0, atol=0)


@pytest.mark.slow("qwen2_moe-cuts1")
@pytest.mark.parametrize("family, cuts", [("mixtral", None), ("qwen2_moe", ())])
def test_experts_are_in_8_bits_and_their_routers_are_not(family, cuts, tmp_path):
    """Each expert has scales of its own; written and read again, and never made wide together."""
    dense = hf_models.save(hf_models.make(family), tmp_path / "dense")
    model, params = from_pretrained(dense, "float32", cuts=cuts, quantization="int8")
    _, want = from_pretrained(dense, "float32", cuts=cuts)
    pairs = zip(params["layers"], want["layers"], strict=True)
    program = str(jax.make_jaxpr(model.apply)({"params": params}, hf_models.tokens()))
    for stack, wide in [pair for pair in pairs if "experts" in pair[0]["mlp"]]:
        assert "scale" not in stack["mlp"]["router"]
        for name, part in stack["mlp"]["experts"].items():
            kernel = np.asarray(wide["mlp"]["experts"][name]["kernel"])
            error = np.linalg.norm(kernel_of(part) - kernel, axis=(-2, -1))
            assert part["kernel"].dtype == jnp.int8
            assert (error < 0.009 * np.linalg.norm(kernel, axis=(-2, -1))).all()
            assert f"f32[{','.join(map(str, kernel.shape[-3:]))}]" not in program
    got, exact = (
        jax.jit(model.apply)({"params": each}, hf_models.tokens())
        for each in (params, dequantised(params, jnp.float32))
    )
    np.testing.assert_allclose(got, exact, atol=1e-4)
    save_pretrained(tmp_path / "out", model, params)
    assert_same(from_pretrained(tmp_path / "out", cuts=cuts)[1], params)


@pytest.mark.parametrize("name", ["t5_wide", "whisper"])
def test_encoders_are_in_8_bits_too(name, tmp_path):
    """But for convolutions; written and read again, as transformers names them."""
    dense = encoder_models.save(name, tmp_path / "dense")
    model, params = from_pretrained(dense, "float32", cuts=None, quantization="int8")
    assert all("scale" in part for part in kernels(params))
    assert any("scale" in part for part in kernels(params["encoder"]))
    save_pretrained(tmp_path / "out", model, params)
    assert_same(from_pretrained(tmp_path / "out", cuts=None)[1], params)
    _, want = from_pretrained(dense, "float32", cuts=None)
    for part, wide in zip(kernels(dequantised(params, jnp.float32)), kernels(want), strict=True):
        assert np.linalg.norm(part["kernel"] - wide["kernel"]) < 0.009 * np.linalg.norm(wide["kernel"])


def student_of(folder: Path, quantization: str):
    """(student, parameters) of a model in 8 bits that trains nothing: its upper makers are wide."""
    model, params = from_pretrained(folder, "float32", cuts=None, quantization=quantization)
    student, own = to_swiftkv(model, params, KVPlan.swiftkv(4, 2))
    assert all("scale" in part for part in kernels(own["layers"]) + kernels(own["rows"][:2]))
    assert not any("scale" in part for part in kernels(own["rows"][2:]))
    return student, own


def test_published_students_in_8_bits(tmp_path):
    """As ArcticTraining leaves them: all projections of the student in 8 bits, and the dead originals too."""
    dense = hf_models.save(hf_models.make("llama2"), tmp_path / "dense")
    model, params = from_pretrained(dense, "float32")
    student, own = to_swiftkv(model, params, KVPlan.swiftkv(4, 2))
    save_pretrained(tmp_path / "wide", student, own)
    student, own = from_pretrained(tmp_path / "wide", quantization="fp8")
    save_pretrained(tmp_path / "out", student, own)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.2.self_attn.k_proj_swiftkv.weight"].dtype is E4M3
    assert tensors["model.layers.3.self_attn.q_proj_swiftkv.weight_scale"].shape == (48, 1)
    for name in ("q_proj", "k_proj", "v_proj"):
        for suffix in ("weight", "weight_scale"):
            of = f"model.layers.2.self_attn.{name}"
            tensors[f"{of}.{suffix}"] = tensors[f"{of}_swiftkv.{suffix}"].clone()
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    again, read = from_pretrained(tmp_path / "out")
    assert again.plan == student.plan
    assert_same(read, own)
    pytest.importorskip("compressed_tensors")
    ids = jnp.asarray(hf_models.tokens())
    how = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    theirs = hf_models.load(tmp_path / "out", trust_remote_code=True, dtype=torch.float32, **how)
    got = jax.jit(again.apply)({"params": read}, ids)
    np.testing.assert_allclose(got, hf_models.torch_logits(theirs, np.asarray(ids)), atol=2e-4)


def test_weights_that_answer_after_a_run_stay_in_8_bits(tmp_path):
    """Others, such as trained ones in float32, are in the model's dtype."""
    dense = hf_models.save(hf_models.make("llama_biases"), tmp_path / "dense")
    _, params = from_pretrained(dense, "float32", cuts=None, quantization="int8")
    got = in_dtype(params, "bfloat16")
    assert got["embed"].dtype == jnp.bfloat16
    assert_same(kernels(got["layers"]), kernels(params["layers"]))


@pytest.mark.slow
def test_an_engine_computes_with_8_bit_weights(tmp_path):
    """A student's tokens are those of the same weights in float32, by pages, with a fused fill or not."""
    dense = hf_models.save(hf_models.make("llama2"), tmp_path / "dense")
    student, own = student_of(dense, "int8")
    save_pretrained(tmp_path / "student", student, own)
    prompts = hf_models.tokens(20, 3).tolist()
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    sizes = {"max_model_len": 32, "max_num_seqs": 2, "page_size": 8}
    with pytest.warns(UsageWarning, match="tokenizer"):
        llm = LLM(tmp_path / "student", **sizes)
    held = {part["kernel"].dtype.itemsize for part in kernels(llm.params)}
    assert held == {1, 4}
    wide = dequantised(own, jnp.float32)
    wanted = [tiny_engine.greedy(student, wide, prompt, 8) for prompt in prompts]
    for each in (llm, llm.replace(kernels="fill=reference")):
        got = [out.outputs[0].token_ids for out in each.generate(prompts, greedy, use_tqdm=False)]
        assert got == wanted


def test_slim_rows_of_8_bit_weights(tmp_path):
    """Their makers are solved from q * s; what they do not touch stays in 8 bits."""
    model, params = from_pretrained(
        hf_models.save(hf_models.make("llama2"), tmp_path / "dense"), "float32", quantization="int8"
    )
    _, made = to_slim(model, params, "k")
    _, want = to_slim(model, dequantised(params, jnp.float32), "k")
    assert_same(dequantised(made, jnp.float32), want)
    assert "scale" in made["layers"][0]["mlp"]["up_proj"]
    assert "scale" not in made["rows"][0]["k_proj"]


Q = "model.layers.1.self_attn.q_proj"
Q_SCALE = f"{Q}.weight_scale"
GPTQ = {"quant_method": "gptq", "bits": 4}
NVFP4 = compressed("float", "tensor_group") | {"format": "nvfp4-pack-quantized"}
UNEVEN = compressed("int", "channel", actorder="group")
# what is wrong -> (format, new quantization_config, change of the tensors, words of the message)
BAD = {
    "no scale": ("fp8", None, lambda t: t.pop(Q_SCALE), "no scale"),
    "misshapen": ("int_channel", None, lambda t: t.update({Q_SCALE: torch.ones(7, 1)}), r"\[7, 1\]"),
    "zero": ("int_channel", None, lambda t: t[Q_SCALE].__setitem__(3, 0), "holds 0.0"),
    "nan": ("int_channel", None, lambda t: t[Q_SCALE].__setitem__(3, float("nan")), "holds nan"),
    "asymmetric": (
        "int_channel",
        None,
        lambda t: t.update({f"{Q}.weight_zero_point": torch.ones(1)}),
        "symmetric",
    ),
    "gptq": ("fp8", GPTQ, None, "quant_method 'gptq'"),
    "awq": ("fp8", {"quant_method": "awq"}, None, "quant_method 'awq'"),
    "bitsandbytes": ("fp8", {"quant_method": "bitsandbytes"}, None, "quant_method 'bitsandbytes'"),
    "nvfp4": ("fp8", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, None, "quant_algo 'NVFP4'"),
    "nvfp4 compressed": ("fp8", NVFP4, None, "nvfp4-pack-quantized"),
    "actorder": ("int_channel", UNEVEN, None, "actorder"),
    "no object": ("fp8", ["fp8"], None, "must be an object"),
}


@pytest.mark.parametrize(("name", "said", "change", "words"), BAD.values(), ids=BAD)
def test_what_is_refused(name, said, change, words, tmp_path):
    folder, _ = written(tmp_path, name)
    if said:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": said}))
    if change:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=words):
        from_pretrained(folder)


def test_quantization_of_a_checkpoint_in_other_8_bits(tmp_path):
    folder, _ = written(tmp_path, "fp8")
    with pytest.raises(UsageError, match="float8_e4m3fn already"):
        from_pretrained(folder, quantization="int8")
    with pytest.raises(UsageError, match="int8, fp8"):
        from_pretrained(folder, quantization="int4")
    assert_same(from_pretrained(folder, quantization="fp8")[1], from_pretrained(folder)[1])


def test_blocks_become_8_bits_of_columns_if_asked(tmp_path):
    """The error adds to that of the file: e4m3's 0.027 and int8's 0.008 of the weights."""
    folder, dense = written(tmp_path, "fp8_blocks")
    _, wide = from_pretrained(dense, "float32", cuts=None)
    _, got = from_pretrained(folder, "float32", cuts=None, quantization="int8")
    for part, want in zip(kernels(dequantised(got, jnp.float32)), kernels(wide), strict=True):
        assert np.linalg.norm(part["kernel"] - want["kernel"]) < 0.009 * np.linalg.norm(want["kernel"])
