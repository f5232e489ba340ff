"""The forward kernel: how it is cut up (`config`), which tiles a block takes when (`schedule`), and its warpgroups."""
