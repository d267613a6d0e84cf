"""Distil a student: `python train.py --config configs/tiny.py`."""

import sys

from swiftkv_jax.commands import train

if __name__ == "__main__":
    sys.exit(train())
