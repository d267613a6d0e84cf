"""KV prediction for OpenELM-1.1B: OpenELM-450M reads its prompts (the paper's OE1.1B-KVP-C-450M).

    python train.py --config configs/openelm1_1b_kvp_450m.py

Auxiliary and predictor train, 0.46 B parameters; the 1.08 B are frozen. By the paper's count a prompt takes
1 / 2.36 of the FLOPs. Not run yet. OpenELM's folders have no tokenizer: put Llama 2's beside the weights.
"""

from openelm_pair import openelm_pair

config = openelm_pair("1_1B", "450M")
