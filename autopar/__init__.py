"""autopar: an automatic parallelization planner and compiler for PyTorch."""
