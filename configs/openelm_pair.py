"""KV prediction as its paper trains it (arXiv 2410.08391, section 5), which the configs of OpenELMs share."""

from paper_recipe import ARCHITECTURES

from swiftkv_jax.config import ModelConfig
from swiftkv_jax.distill.config import Experiment, OptimizerConfig, PredictConfig, PredictionLossConfig
from swiftkv_jax.distill.data import DataConfig

_KEPT = {0.75: (0, 1, 2), 0.5: (0, 2), 0.25: (0,)}  # of four neighbouring layers: Table 4


def openelm_pair(base: str, auxiliary: str = "", share: float = 1.0) -> Experiment:
    """A base read by a smaller OpenELM (the paper's KVP-C), or by a `share` of its own layers, 0.75, 0.5 or
    0.25 (KVP-LP). Sizes are "270M", "450M", "1_1B" and "3B".

    The predictor starts from least squares, where the paper's starts at random. The paper's corpora are
    RefinedWeb, ArXiv and Wikipedia: add the other two to `data.sources`.
    """
    shape, *small = (
        ModelConfig.from_hf(ARCHITECTURES / f"openelm_{size.lower()}.json")
        for size in (base, auxiliary)
        if size
    )
    if small:
        read = PredictConfig(auxiliary=f"apple/OpenELM-{auxiliary}", architecture=small[0])
    else:
        keep = tuple(layer for layer in range(shape.num_layers) if layer % 4 in _KEPT[share])
        read = PredictConfig(keep=keep)
    data = DataConfig(
        sources=("hf://tiiuae/falcon-refinedweb",),
        columns=("text=content",),
        split="train",
        seq_len=2048,
        batch_size=1024,
    )
    return Experiment(
        name=f"openelm{base.lower()}_kvp_{auxiliary.lower() or share}",
        model=f"apple/OpenELM-{base}",
        architecture=shape,
        predict=read,
        trainable="predictor",
        data=data,
        loss=PredictionLossConfig(z_loss=1e-4),
        optimizer=OptimizerConfig(
            learning_rate=1.2e-3,
            warmup=1 / 14,
            schedule="cosine",
            final_share=0.1,
            weight_decay=0.1,
            beta2=0.95,
        ),
        steps=70_000,
    )
