"""The commands `swiftkv plan`, `swiftkv distil` and `swiftkv push`; commands.py says where the others are."""
