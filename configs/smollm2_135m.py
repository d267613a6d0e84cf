"""SwiftKV at 50 % for SmolLM2-135M-Instruct on a CPU: two hours on 2 cores.

    python train.py --config configs/smollm2_135m.py

Half of the tokens are the model's own answers to demo/prompts*.jsonl, half Python's documentation. `--resume`
continues a run that was stopped. docs/results.md has what the student answers. With the weights that
`make demo-smollm2` installs: `--set model=FILE.gguf`.
"""

from swiftkv_jax.distill.config import Experiment, LossConfig, MeshConfig, OptimizerConfig, PlanConfig
from swiftkv_jax.distill.data import DataConfig

corpus, chats = "demo/corpus.jsonl.xz", "self://demo/prompts*.jsonl?max_tokens=256"

config = Experiment(
    name="smollm2_135m",
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    plan=PlanConfig(split=15, init="least_squares", init_tokens=65_536),
    data=DataConfig(
        sources=(corpus, chats),
        weights=(1.0, 9.0),
        split="train",
        seq_len=512,
        batch_size=4,
        long_documents="fill",
    ),
    evaluation=DataConfig(
        sources=(corpus,), split="held_out", seq_len=2048, batch_size=1, long_documents="fill"
    ),
    eval_lengths=(512, 2048),
    evaluation_batches=4,
    evaluate_every=175,
    loss=LossConfig(temperature=1.0, chunk_mib=64.0),
    optimizer=OptimizerConfig(learning_rate=5e-4, beta2=0.98, weight_decay=0.0),
    mesh=MeshConfig(fsdp=1, tensor=-1),
    dtype="float32",
    steps=500,
    remat=False,
    log_every=10,
    checkpoint_every=50,
)
