"""What `swiftkv plan`, `swiftkv distil` and `swiftkv push` do; the others are elsewhere (commands.py)."""
