"""Which way of making prompts cheaper costs least at equal FLOPs? One model, one text: a table and plots.

    python -m benchmarks.papers.compare --model demo/teacher

SwiftKV, AcrossKV, KV prediction, its auxiliaries alone, and the systems of baselines/ read the same held-out
prompts, untrained or (`--train STEPS`) trained on equally many tokens. They are
evaluated on the first token after each prompt: its cross-entropy above the model's own, and how often both
have the same most likely token. The cost is the FLOPs of the prompt, relative to all its tokens in all
layers, and the time to the first token.
"""
