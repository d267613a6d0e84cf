"""Which way of making prompts cheaper costs least at equal FLOPs? One model, one text: a table and plots.

    python -m swiftkv_jax.compare --model demo/teacher

SwiftKV, AcrossKV, KV prediction, its auxiliaries alone, and the systems of baselines/ read the same held-out
prompts, untrained or (`--train STEPS`) trained on equally many tokens. Judged is the first token after each:
its cross-entropy above the model's own, and how often both find the same token likeliest. Costs are FLOPs of
reading the prompt, over those of all its tokens in all layers, and beside them the time to the first token.
"""
