"""The systems that KV prediction is compared with, on a dense cache: definitions for measuring quality.

Random and static pruning of tokens, LazyLLM and FFN-SkipLLM. None of them trains anything, and each keeps the
model's weights. `generate` runs them. Their FLOPs are counted (`dense.flops`), but they do not run faster.
"""

import dataclasses

from benchmarks.papers.baselines.ffn_skip import FFNSkip
from benchmarks.papers.baselines.generate import Baseline, check, follow, generate, read, stream
from benchmarks.papers.baselines.lazy_llm import LazyLLM
from benchmarks.papers.baselines.pruning import RandomPruning, StaticPruning
from swiftkv_jax.common.checks import choice
from swiftkv_jax.common.errors import UsageError, suggest

__all__ = ["Baseline", "FFNSkip", "LazyLLM", "RandomPruning", "StaticPruning"]
__all__ += ["check", "follow", "generate", "named", "read", "stream"]

_KINDS = {"ffn_skip": FFNSkip, "lazy_llm": LazyLLM}
_KINDS |= {"random_pruning": RandomPruning, "static_pruning": StaticPruning}


def named(name: str, **fields) -> Baseline:
    """The system of this name, such as "lazy_llm", with these fields.

    Raises:
      UsageError: no system has that name, or a field is unknown, missing or invalid.
    """
    choice("baseline", name, tuple(_KINDS))
    known = dataclasses.fields(_KINDS[name])
    for field in fields:
        if field not in {each.name for each in known}:
            near = suggest(field, [each.name for each in known])
            raise UsageError(f"{name} has no field {field!r}{near}")
    for each in known:
        if each.default is dataclasses.MISSING and each.name not in fields:
            raise UsageError(f"{name} needs {each.name}: give {each.name}=NUMBER")
    return _KINDS[name](**fields)
