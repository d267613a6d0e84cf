"""Which implementation is right and fast on this machine, found by running each in another process."""
