"""Experiment files, `--set`, and the recipes against the paper's trainable shares."""

import dataclasses
import importlib
import itertools
from pathlib import Path

import jax
import pytest

from benchmarks.papers.prediction_flops import PRINTED
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.folder import DEMO
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import predict, sharding, weights
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.distill import start
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.config import Experiment, from_package, load_experiment
from swiftkv_jax.distill.fields import override, rows, table

CONFIGS = Path(__file__).parent.parent.parent / "configs"
SMALL = ("tiny", "tiny_kvp", "smollm2_135m", "demo_teacher", "mha_teacher")
OTHERS = (*SMALL, "paper_recipe", "one_gpu", "openelm_pair")
# KV prediction: billions of the base and the auxiliary (model cards); the predictor by hand, two biased maps
# for each row of the base.
PREDICTED = {
    "llama8b_kvp_1b": (8.030, 1.236, 32 * 2 * (512 * 1024 + 1024)),
    "llama70b_kvp_8b": (70.554, 8.030, 80 * 2 * (1024 * 1024 + 1024)),
    "openelm1_1b_kvp_450m": (1.080, 0.457, 6_206_592),
    "openelm3b_kvp_half": (3.037, 1.541, 25_469_952),
}
OTHERS += tuple(PREDICTED)
PUBLISHED = sorted(p.stem for p in CONFIGS.glob("*.py") if p.stem not in OTHERS)

# Total parameters in billions (model cards), and trained ones by the paper's rule, worked out by hand:
# (L - split) * (D*N*H + 2*D*K*H) + D, plus biases and norms of q, k and v where the family has them.
# Of latents q, the projection that makes them with its norm, and the one that expands them.
SIZES = {
    "deepseek_v2_lite": (15.706, 12 * (2048 * 16 * 192 + 2048 * 576 + 512 + 512 * 16 * 256) + 2048),
    "llama8b": (8.030, 16 * (4096 * 4096 + 2 * 4096 * 1024) + 4096),
    "llama8b_reference": (8.030, 16 * (4096 * 4096 + 2 * 4096 * 1024) + 4096),
    "llama8b_128k": (8.030, 16 * (4096 * 4096 + 2 * 4096 * 1024) + 4096),
    "llama70b": (70.554, 40 * (8192 * 8192 + 2 * 8192 * 1024) + 8192),
    "llama405b": (405.853, 63 * (16384 * 16384 + 2 * 16384 * 1024) + 16384),
    "llama405b_fp8": (405.853, 63 * (16384 * 16384 + 2 * 16384 * 1024) + 16384),
    "llama3_2_3b": (3.213, 11 * (3072 * 3072 + 2 * 3072 * 1024) + 3072),
    "mistral_small": (22.247, 28 * (6144 * 6144 + 2 * 6144 * 1024) + 6144),
    "qwen2_5_14b": (14.770, 12 * (5120 * 5120 + 2 * 5120 * 1024 + 5120 + 2 * 1024) + 5120),
    "llama3_2_1b": (1.236, 6 * (2048 * 2048 + 2 * 2048 * 512) + 2048),
    "qwen2_5_0_5b": (0.494, 6 * (896 * 896 + 2 * 896 * 128 + 896 + 2 * 128) + 896),
    "qwen2_5_1_5b": (1.544, 7 * (1536 * 1536 + 2 * 1536 * 256 + 1536 + 2 * 256) + 1536),
    "qwen3_0_6b": (0.596, 7 * (1024 * 2048 + 2 * 1024 * 1024 + 2 * 128) + 1024),
    "qwen3_4b": (4.022, 9 * (2560 * 4096 + 2 * 2560 * 1024 + 2 * 128) + 2560),
    "smollm2_1_7b": (1.711, 8 * (2048 * 2048 + 2 * 2048 * 2048) + 2048),
}
# The recipes for one GPU, and the published config.json whose values they have.
ONE_GPU = {
    "llama3_2_1b": "meta-llama--Llama-3.2-1B-Instruct",
    "qwen2_5_0_5b": "Qwen--Qwen2.5-0.5B-Instruct",
    "qwen2_5_1_5b": "Qwen--Qwen2.5-1.5B-Instruct",
    "qwen3_0_6b": "Qwen--Qwen3-0.6B",
    "qwen3_4b": "Qwen--Qwen3-4B",
    "smollm2_1_7b": "HuggingFaceTB--SmolLM2-1.7B-Instruct",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_trains_the_papers_share(name):
    experiment = load_experiment(CONFIGS / f"{name}.py")
    plan = experiment.plan.build(experiment.architecture)
    student = Transformer(experiment.architecture, plan, experiment.dtype)
    recipe = start.make_recipe(experiment, student, 10)
    mesh = sharding.make_mesh(fsdp=-1, devices=jax.devices()[:1])
    state, frozen = steps.abstract_run(recipe, mesh)
    billions, trained = SIZES[name]
    total = weights.count(weights.weights(experiment.architecture, plan))
    assert total / 1e9 == pytest.approx(billions, abs=1e-3)
    assert weights.count(state.trainable) == trained
    assert trained / total < 0.10  # section 3.4: "typically <10% of the total"
    # Weights that teacher and student share exist once: the frozen rest of the student, and the teacher's
    # own weights in place of those that the student trains.
    assert weights.count(frozen.student) == total - trained
    assert weights.count(frozen.teacher) <= trained + weights.count(recipe_rows(student))


@pytest.mark.parametrize("name", ONE_GPU)
def test_a_recipe_for_one_gpu_has_the_published_architecture_and_a_row_at_a_time(name):
    e = load_experiment(name)
    file = CONFIGS.parent / "tests" / "published_configs" / f"{ONE_GPU[name]}.json"
    assert e.architecture == ModelConfig.from_hf(file)
    assert ONE_GPU[name].replace("--", "/") == e.model
    assert e.data.batch_size == e.optimizer.accumulate == 16 and e.data.seq_len == 4096
    assert tuple(e.held_out()) == (2048, 4096)


@pytest.mark.parametrize("name", [*SIZES, *PREDICTED, *SMALL])
def test_least_squares_starts_every_recipe_but_the_papers_and_plain_training(name):
    plain, paper = name in ("demo_teacher", "mha_teacher"), name in SIZES and name not in ONE_GPU
    assert load_experiment(CONFIGS / f"{name}.py").fits_start == (not plain and not paper)


@pytest.mark.parametrize("name", PREDICTED)
def test_a_predictors_recipe_trains_the_auxiliary_and_the_maps(name):
    base, auxiliary, maps = PREDICTED[name]
    model = start.abstract_student(load_experiment(CONFIGS / f"{name}.py"))
    trained, frozen = start.make_recipe(load_experiment(name), model, 10).method.trees(model, "predictor")
    assert weights.count(frozen.student) / 1e9 == pytest.approx(base, abs=1e-3)
    assert weights.count(trained["auxiliary"]) / 1e9 == pytest.approx(auxiliary, abs=1e-3)
    assert weights.count(trained["predictor"]) == maps
    served = [model.prediction.reads.count(row) for row in range(model.auxiliary.plan.num_rows)]
    many = {"llama70b_kvp_8b": [3] * 16 + [2] * 16, "openelm1_1b_kvp_450m": [2] * 8 + [1] * 12}
    assert served == many.get(name, [2] * len(served))


@pytest.mark.parametrize("name", [name for name in PRINTED if "-KVP-" in name])
def test_every_openelm_pair_saves_what_the_paper_says(name, monkeypatch):
    """FLOPs reduction is the ratio of parameters (section 4.4), to the printed digits."""
    monkeypatch.syspath_prepend(CONFIGS)
    pair = importlib.import_module("openelm_pair").openelm_pair
    base, kind, which = name.replace("1.1B", "1_1B").replace("KVP-", "").split("-")
    model = start.abstract_student(pair(base, which) if kind == "C" else pair(base, share=float(which)))
    tree = predict.described(model)
    assert round(weights.count(tree["base"]) / weights.count(tree["auxiliary"]), 2) == PRINTED[name]


def recipe_rows(student: Transformer):
    """The makers of a standard teacher above the split: AcrossKV students have fewer."""
    standard = KVPlan.standard(student.config.num_layers).stored_as(student.config.form)
    tree = weights.weights(student.config, standard, (student.plan.depth,))
    return tree["rows"][1:]


@pytest.fixture
def tiny() -> Experiment:
    return load_experiment(CONFIGS / "tiny.py")


def test_set_changes_one_field_and_nothing_else(tiny):
    changed = override(
        tiny, ["optimizer.learning_rate=1e-5", "plan.share=2", "data.sources=('a.jsonl','b.txt')", "name=x"]
    )
    assert changed.optimizer.learning_rate == 1e-5 and changed.plan.share == 2
    assert changed.data.sources == ("a.jsonl", "b.txt") and changed.name == "x"
    back = dataclasses.replace(
        changed,
        optimizer=tiny.optimizer,
        plan=tiny.plan,
        name=tiny.name,
        data=dataclasses.replace(changed.data, sources=tiny.data.sources),
    )
    assert back == tiny


TOGETHER = (  # each valid only with the others
    ("data.seq_len=128", "data.piece_lengths=(128,)", "data.batch_size=3", "optimizer.accumulate=3"),
    ("loss.kl_weight=0", "loss.lm_weight=1"),
    ("trainable=all", "plan.split=0", "plan.share=1", "loss.kl_weight=0", "loss.lm_weight=1"),
    ("evaluation.seq_len=64", "eval_lengths=(64,)"),
    ("data.chats=plain", "data.mask=all"),
)


@pytest.mark.parametrize("together", TOGETHER)
def test_assignments_are_checked_together_in_any_order(tiny, together):
    tiny = override(tiny, ["data.piece_lengths=(256,2048)", "data.mask=assistant"])
    orders = list(itertools.permutations(together))
    found = [override(tiny, order) for order in orders]
    assert all(config == found[0] for config in found) and found[0] != tiny
    assert override(found[0], ["steps=7"]).steps == 7


@pytest.mark.parametrize(
    "assignment, message",
    [
        ("optimizer.lr=1", "unknown key 'optimizer.lr'"),
        ("steps.x=1", "steps has no fields"),
        ("steps=ten", "steps must be int, not 'ten'"),
        (f"steps={'(' * 1000}", "steps must be int"),
        (f"seed={2**63}", "seed must be in"),
        ("steps", "a setting is key=value"),
        ("trainable=qkv", "trainable must be one of"),
        ("optimizer.warmup=1.5", "warmup is a share"),
        ("optimizer.beta2=1.0", r"optimizer\.beta2 is a share, below 1, not 1\.0"),
        ("plan.split=-1", "plan.split must be at least 0"),
        ("optimizer.accumulate=3", "is not a multiple of optimizer.accumulate 3"),
        ("trainable=all", "without a teacher"),
        ("eval_lengths=(256,4096)", r"at most evaluation\.seq_len 2048, not 4096"),
        ("attention=splish", "did you mean 'splash'"),
    ],
)
def test_an_invalid_set_argument_is_refused_with_a_remedy(tiny, assignment, message):
    with pytest.raises(UsageError, match=message):
        override(tiny, [assignment])


def test_every_field_has_a_meaning_and_set_knows_it(tiny):
    told = rows()
    assert not [name for name, _, _, meaning in told if not meaning]
    names = {name for name, *_ in told}
    assert {"name", "data.sources", "plan.split", "optimizer.beta2", "predict.keep", "steps"} <= names
    for name in names:
        try:
            override(tiny, [f"{name}=?"])
        except UsageError as error:
            assert "unknown key" not in str(error) or name.startswith("predict."), "that one has no predict"
    assert ("optimizer.clip", "float", "1.0", "the gradient is clipped to this global norm.") in told
    assert table("mesh").count("[int, ") == 4 and table("steps").endswith("[int, 0]")
    with pytest.raises(UsageError, match="optimizer"):
        table("optimiser")


@pytest.mark.parametrize(
    "text, message",
    [
        ("config = 1", "must define `config = Experiment"),
        ("import nothing_at_all", "ModuleNotFoundError"),
        ("from swiftkv_jax.distill.config import PlanConfig\nPlanConfig(init='x')", "plan.init"),
        ("from swiftkv_jax.distill.config import PlanConfig\nPlanConfig(split=True)", "plan.split"),
    ],
)
def test_a_bad_config_file_is_one_line(tmp_path, text, message):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_experiment(path)


def test_paths_of_the_demo_are_the_packages_where_there_is_no_clone(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    assert from_package(tiny) == tiny
    monkeypatch.chdir(tmp_path)
    found = from_package(override(tiny, ["data.sources=('demo/corpus.jsonl.xz', 'demo/mine.jsonl')"]))
    assert found.model == str(DEMO / "teacher") and not found.tokenizer
    assert found.data.sources == (str(DEMO / "corpus.jsonl.xz"), "demo/mine.jsonl")
    assert found.evaluation is not None and found.evaluation.sources == (str(DEMO / "corpus.jsonl.xz"),)
