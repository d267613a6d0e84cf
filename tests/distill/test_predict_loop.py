"""Runs of train.py that train KV prediction: the adapter they leave, resumed runs, and what is refused."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from test_loop import ROOT, assert_same_run, final_state, losses
from tokenizers_made import CHATML, make_tokenizer

from swiftkv_jax.checkpoint.adapter import from_pretrained
from swiftkv_jax.checkpoint.hf import save_pretrained
from swiftkv_jax.cli.train import main
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import predict, surgery, weights
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.distill import loop
from swiftkv_jax.distill.config import load_experiment
from swiftkv_jax.distill.fields import override
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams

STEPS = 12
FILES = ("predictor.safetensors", "auxiliary/model.safetensors")
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1}
CONFIG = """
from swiftkv_jax.distill.config import Experiment, OptimizerConfig, PredictConfig, PredictionLossConfig
from swiftkv_jax.distill.data.loader import DataConfig

config = Experiment(
    name="small", model={model!r}, tokenizer={tokenizer!r}, trainable="predictor",
    predict=PredictConfig(keep=(0, 2), init_tokens=400),
    data=DataConfig(sources=({data!r},), seq_len=24, batch_size=2),
    evaluation=DataConfig(sources=({data!r},), seq_len=24, batch_size=2), evaluation_batches=2,
    loss=PredictionLossConfig(kl_weight=1.0, z_loss=1e-4),
    optimizer=OptimizerConfig(learning_rate=1e-2, accumulate=2), dtype="float32", export_dtype="float32",
    steps={steps}, remat=False, log_every=10, checkpoint_every=4,
)
"""


def saved(folder: Path, vocab: int = 2048, seed: int = 0, **sizes) -> Path:
    config = ModelConfig(vocab_size=vocab, head_dim=8, **(SIZES | sizes))
    model = Transformer(config, KVPlan.standard(config.num_layers))
    params = weights.init(config, model.plan, jax.random.key(seed))
    save_pretrained(folder, model, jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, params))
    return folder


def trained(experiment, out: Path, **options) -> loop.Result:
    with loop.opened(experiment, out, **{"say": lambda line: None, **options}) as run:
        return run.go()


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A config file for a 4-layer base, a few sentences, and the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    words = np.random.default_rng(0).choice("a row of keys and values , made once read often".split(), 2000)
    texts = [" ".join(words[i : i + 20]) for i in range(0, 2000, 20)]
    lines = [json.dumps({"text": text, "id": str(i)}) + "\n" for i, text in enumerate(texts)]
    (folder / "data.jsonl").write_text("".join(lines))
    paths = {"model": str(saved(folder / "base")), "data": str(folder / "data.jsonl")}
    text = CONFIG.format(tokenizer=str(ROOT / "demo" / "tokenizer"), steps=STEPS, **paths)
    (folder / "small.py").write_text(text)
    return folder / "small.py"


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    trained(load_experiment(config), out)
    return out


@pytest.mark.slow
def test_a_run_that_is_cut_off_and_resumed_is_the_undisturbed_one(config, undisturbed, tmp_path, monkeypatch):
    """Cut off after step 7, three steps past a checkpoint."""
    real = loop.Run._report

    def fails(self, pending, began):
        if pending is not None and pending[0] == 7:
            raise KeyboardInterrupt
        return real(self, pending, began)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "_report", fails)
        with pytest.raises(KeyboardInterrupt):
            trained(load_experiment(config), tmp_path / "run")
    said: list[str] = []
    trained(load_experiment(config), tmp_path / "run", resume=True, say=said.append)
    assert "resumed from step 4" in said and not any("least squares" in line for line in said)
    assert_same_run(tmp_path / "run", undisturbed, *FILES)
    assert sorted(losses(undisturbed)) == list(range(1, STEPS + 1))


def served_as_defined(folder: Path) -> None:
    """First tokens of prompts of every length from 1 to 20, by the engine and by `forward(own=True)`."""
    model, params = from_pretrained(folder, dtype="float32")
    tokens = np.random.default_rng(1).integers(3, 2048, (1, 20)).astype(np.int32)
    x = predict.forward(model, params, jnp.asarray(tokens))
    want = np.argmax(logits(model.base, params["base"], x), -1)[0]
    llm = LLM(folder, dtype="float32", max_model_len=64)
    prompts = [tokens[0, :n].tolist() for n in range(1, 21)]
    found = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), False)
    assert [o.outputs[0].token_ids[0] for o in found] == want.tolist()


@pytest.mark.slow
def test_the_export_is_what_was_trained_and_is_served_as_defined(config, undisturbed):
    folder = undisturbed / "export"
    state = final_state(undisturbed)
    exported = safetensors.numpy.load_file(folder / "predictor.safetensors")
    kernels = [x for name, x in state.items() if "trainable" in name and "predictor" in name and x.ndim == 3]
    for row in range(4):
        assert any(np.array_equal(exported[f"rows.{row}.v.weight"].T, x[row]) for x in kernels)
    assert json.loads((folder / "kv_prediction.json").read_text())["reads"] == [0, 0, 1, 1]
    assert (folder / "tokenizer.json").exists() and (folder / "auxiliary" / "tokenizer.json").exists()
    rows = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval/kl"] > 0 and rows[-1]["eval/auxiliary_cross_entropy"] > 0
    served_as_defined(folder)


@pytest.mark.slow
def test_the_kept_layers_of_a_model_train_alone(config, tmp_path):
    """OE-LP: a layer-pruned model, which transformers would load."""
    text = config.read_text().replace(
        "PredictionLossConfig(kl_weight=1.0, z_loss=1e-4)", "LossConfig(kl_weight=0.0, lm_weight=1.0)"
    )
    text = text.replace("PredictionLossConfig", "LossConfig").replace(
        "predict=PredictConfig(keep=(0, 2), init_tokens=400)", "keep=(0, 2)"
    )
    (tmp_path / "pruned.py").write_text(text.replace('trainable="predictor"', 'trainable="all"'))
    few = ["steps=1", "optimizer.learning_rate=1e-9"]
    experiment = override(load_experiment(tmp_path / "pruned.py"), few)
    result = trained(experiment, tmp_path / "run")
    model, params = from_pretrained(result.export, dtype="float32")
    base = from_pretrained(experiment.model, dtype="float32")
    _, want = surgery.layer_pruned(*base, (0, 2))
    assert model.plan == KVPlan.standard(2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), params, want)


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> dict[str, str]:
    """Auxiliaries that do not fit: one of a small vocabulary, one of another tokenizer, one of wide rows."""
    folder = tmp_path_factory.mktemp("others")
    stranger = saved(folder / "stranger", num_layers=2)
    make_tokenizer(stranger, CHATML)
    parts = {"few": saved(folder / "few", vocab=300, num_layers=2), "stranger": stranger}
    parts["wide"] = saved(folder / "wide", num_layers=2, num_kv_heads=2)
    return {name: str(path) for name, path in parts.items()}


@pytest.mark.parametrize(
    ("sets", "named"),
    [
        (["trainable=all"], "trainable"),
        (["plan.split=2"], "plan.split"),
        (["predict.keep=()"], "auxiliary"),
        (["predict.keep=(2,0)"], "keep"),
        (["predict.map=nearer"], "'nearest'"),
        (["predict.tail=0"], "tail"),
        (["loss.z_loss=-1.0"], "loss.z_loss"),
        (["loss.rows_weight=0.0", "loss.lm_weight=0.0", "loss.kl_weight=0.0"], "predictor"),
        (["predict.auxiliary={few}", "predict.keep=()"], "300"),
        (["predict.auxiliary={stranger}", "predict.keep=()"], "tokenizers"),
        (["predict.auxiliary={wide}", "predict.keep=()", "predict.init=identity"], "least_squares"),
    ],
)
def test_a_wrong_config_is_one_line_and_exit_code_2(config, others, tmp_path, capsys, sets, named):
    words = [word for each in sets for word in ("--set", each.format(**others))]
    assert main(["--config", str(config), "--out", str(tmp_path / "run"), *words]) == 2
    said = capsys.readouterr().err
    assert named in said and len(said.strip().splitlines()) == 1, said
