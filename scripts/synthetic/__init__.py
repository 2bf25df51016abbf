"""Synthetic checkpoints of real sizes whose weights carry recorded routing."""
