"""What kernels share: the choice of an implementation, pools, masks, tiles, the C++ toolchain."""
