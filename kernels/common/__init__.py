"""Shared code of the kernels: the choice of an implementation, pools, masks, tiles, the C++ toolchain."""
