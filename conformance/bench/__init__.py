"""The verb `bench`: every operation on mlximpl, on the installed mlx-lm and against a floor, in one run."""
