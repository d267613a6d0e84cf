"""Transformers on the same device, at the engine's shape and with random weights."""

import time
from collections.abc import Iterator

from benchmarks.device.shapes import shape_of
from swiftkv_jax.config.plan import KVPlan

DECODED = 17  # tokens of each prompt that are generated
TOGETHER = 4  # prompts that are read in one call


def transformers(shape: str, requests: int, prompt: int) -> Iterator[dict]:
    """Time to the first token of one prompt, prompt tokens per second in batches of `TOGETHER`, and the time
    of a decoded token of all `requests` together."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config, device = shape_of(shape).config, "cuda" if torch.cuda.is_available() else "cpu"
    fields = config.to_hf(KVPlan.standard(config.num_layers)) | {"dtype": "bfloat16"}
    torch.manual_seed(0)
    with torch.device(device), torch.inference_mode():
        model = LlamaForCausalLM(LlamaConfig(**fields)).to(torch.bfloat16).eval()

        def seconds(count: int, new: int) -> float:
            tokens = torch.randint(2, config.vocab_size, (count, prompt))
            asked = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
            began = time.perf_counter()
            model.generate(tokens, attention_mask=torch.ones_like(tokens), **asked).sum().item()
            return time.perf_counter() - began

        seconds(1, 2)
        yield {"ttft_ms": 1e3 * seconds(1, 1)}
        together = min(TOGETHER, requests)
        yield {"prompt_tokens_per_s": together * prompt / seconds(together, 1)}
        one, more = seconds(requests, 1), seconds(requests, DECODED)
        yield {"tpot_ms": 1e3 * (more - one) / (DECODED - 1)}
