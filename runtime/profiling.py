"""Keeps what decoding has cost an engine for the next plan of its model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from .assembly import Blueprint
from .plan import Plan
from .profile import DecodeLog, Profile, make_profile
from .user_cache import load, model_key, save


def profile_key(blueprint: Blueprint) -> str:
    """Names model, machine and device in the user's cache."""
    variant = f"{mx.default_device()} {'float32' if blueprint.widen else 'checkpoint'}"
    return model_key(blueprint.checkpoint.directory, variant=variant)


@contextmanager
def profiled(blueprint: Blueprint, plan: Plan, log: DecodeLog, *, guessed: bool) -> Iterator[None]:
    """Save a profile when the engine is closed, if it has decoded enough for one.

    Args:
        blueprint: of the model.
        plan: its slots.
        log: of the engine.
        guessed: whether experts are read ahead while tokens are decoded.
    """
    layers = blueprint.size.layers
    held = [(layer, n) for layer, n in zip(layers, plan.slots, strict=True) if n < layer.experts]
    streamed, slots = [layer for layer, _ in held], [n for _, n in held]
    key = profile_key(blueprint)
    del blueprint  # the frame lives as long as the engine, and must not hold the model
    yield
    whole = len(layers) - len(streamed)
    profile = make_profile(log, streamed, whole, None if guessed else slots)
    if profile is not None:
        older = Profile.from_json(load("profile", key))
        save("profile", key, profile.completed(older).to_json())
