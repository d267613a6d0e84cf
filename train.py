"""Distil a student: `python train.py --config configs/tiny.py`."""

import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it misses PyTorch; we do not
    if "--compile-only" in sys.argv:
        os.environ["JAX_PLATFORMS"] = "cpu"  # compiling for another chip needs none of this machine's
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    from swiftkv_jax.distill.main import main

    sys.exit(main())
