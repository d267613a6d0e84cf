"""Distil a student: `python train.py --config configs/tiny.py`."""

import sys

from swiftkv_jax.cli.commands import train

if __name__ == "__main__":
    sys.exit(train())
