"""Tiny models with random weights through mlx-lm's own model code, and what is asked of their caches."""
