"""KV prediction for OpenELM-3B: every second of its own layers reads its prompts (OE3B-KVP-LP-0.50).

    python train.py --config configs/openelm3b_kvp_half.py

By the paper's count a prompt takes 1 / 1.97 of the FLOPs. Not run yet.
"""

from openelm_pair import openelm_pair

config = openelm_pair("3B", share=0.5)
