"""Turns an mlx-lm model into one whose routed experts are streamed."""
