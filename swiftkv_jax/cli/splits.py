"""The splits to measure, and the choice of `--split auto`."""

from collections.abc import Mapping

from swiftkv_jax.common.errors import UsageError

MOST_KL = 0.5  # nats per token
SHARE = "AcrossKV: number of later layers that share one row"  # the help of --share


def candidates(layers: int) -> list[int]:
    """Splits to measure: every eighth of the depth from a quarter on."""
    return sorted({min(max(1, round(layers * part / 8)), layers - 1) for part in range(2, 8)})


def chosen(kl: Mapping[int, float], layers: int) -> int:
    """The earliest split from half depth on whose untrained student has a KL of at most `MOST_KL`; the best
    one if there is none. `kl` is in nats per token, by split.

    In the paper 50 % SwiftKV costs 1 to 2 % of accuracy after distillation, and beyond that quality drops
    quickly; where the later layers' inputs are less similar (Qwen), 50 % is already too much (SwiftKV paper,
    section 4.2). This is a first guess: only distillation shows what a split really costs.
    """
    half = [split for split in kl if 2 * split >= layers]
    if not half:
        raise UsageError("no split at half depth or later was evaluated")
    return min((split for split in half if kl[split] <= MOST_KL), default=min(half, key=kl.__getitem__))
