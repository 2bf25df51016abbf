"""Write a synthetic checkpoint of a real model's size in mlx-lm's format, in little memory.

The numbers are random but valid. The routing is real: the routers choose, token by token, what a
recording says, because embeddings and gates are made for it (``synthetic/gates.py``); greedy
decoding walks through the recorded steps by itself. By default that is the demo model's routing.
With ``--routing random`` the gates are random.

    python -m scripts.make_checkpoint DIRECTORY --shape qwen3-30b-a3b [--layers 8] [--aligned]
    python -m scripts.make_checkpoint DIRECTORY --shape gpt-oss-120b --routing gptoss.route.csv.gz

With ``--aligned`` every expert's bytes begin at a page of the file where its tensors are of whole
pages, so that direct I/O applies.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path

import numpy as np

from moestream.io.errors import MoestreamError
from moestream.runtime.errors import InvalidRequest

from .synthetic.gates import most_steps
from .synthetic.routing import DEMO, Composed, compose, load_routing
from .synthetic.shapes import SHAPES, Shape
from .synthetic.tensors import FIRST_TOKEN, Tensors
from .synthetic.writer import write_checkpoint

__all__ = ["SHAPES", "Shape", "make_checkpoint", "read_routing", "route"]

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SIZES = tuple(field.name for field in fields(Shape) if field.type == "int")


def route(
    shape: Shape, recording: Path, *, steps: int | None = None, seed: int = 0, exact: bool = False
) -> tuple[Shape, Composed]:
    """Routing for a shape, which gets a smaller top_k where the recording has too few ranks.

    Args:
        shape: of the model.
        recording: file that ``load_routing`` reads.
        steps: at most; None for as many as were recorded. Never more than embeddings can be
            orthogonal and the vocabulary has tokens.
        seed: of the composition.
        exact: refuse a recording with too few ranks.
    """
    recorded = load_routing(recording)
    groups = shape.experts // recorded.experts
    if not exact and groups:
        shape = replace(shape, top_k=min(shape.top_k, groups * recorded.ranks))
    most = min(most_steps(shape.hidden), shape.vocabulary - FIRST_TOKEN)
    if most < 1 or (steps is not None and steps < 1):
        raise InvalidRequest(f"there must be a step, and more than {FIRST_TOKEN} tokens")
    made = compose(
        recorded,
        layers=shape.layers,
        experts=shape.experts,
        top_k=shape.top_k,
        steps=most if steps is None else min(steps, most),
        seed=seed,
    )
    return shape, made


def make_checkpoint(
    directory: Path,
    shape: Shape,
    *,
    routed: Composed | None = None,
    seed: int = 0,
    aligned: bool = False,
    quiet: bool = False,
) -> Path:
    """Write a checkpoint, a shard per layer, with the demo model's tokenizer.

    Args:
        directory: to make.
        shape: of the model.
        routed: what its routers choose, from ``route``; None for random gates.
        seed: of the random numbers.
        aligned: put tensors of whole pages at pages.
        quiet: no progress bar.

    Raises:
        MoestreamError: the directory is taken, or the drive is too full.
    """
    tensors = Tensors(shape, None if routed is None else routed.routing)

    def finish(folder: Path) -> None:
        demo = files("moestream") / "data" / "demo-moe-4bit"
        for name in TOKENIZER:
            shutil.copy(str(demo / name), folder / name)
        if routed is not None:
            _write_routing(folder, routed)
        (folder / "config.json").write_text(json.dumps(shape.config(), indent=2))

    shards = list(tensors.shards())
    write_checkpoint(directory, shards, finish, seed=seed, aligned=aligned, quiet=quiet)
    return directory


def _write_routing(folder: Path, routed: Composed) -> None:
    """``routing.json`` says what the routing is, ``routing.npz`` holds it."""
    routing = routed.routing
    np.savez_compressed(
        folder / "routing.npz", chosen=routing.chosen, weights=routing.weights.astype(np.float16)
    )
    about = {
        "first_token": FIRST_TOKEN,
        "steps": routing.steps,
        "segments": routed.segments,
        "segments_overlap": routed.overlap,
        "description": routed.words,
    }
    (folder / "routing.json").write_text(json.dumps(about, indent=2))


def read_routing(directory: Path) -> tuple[int, np.ndarray]:
    """Of a checkpoint with recorded routing: id of the first token, and the routed experts.

    Token ``first + t`` is step t; any other token v has the routing of step (v - first) modulo
    the number of steps.

    Returns:
        The id, and ``[steps, layers, top_k]`` expert ids, the largest gate weight first.
    """
    first = int(json.loads((directory / "routing.json").read_text())["first_token"])
    with np.load(directory / "routing.npz") as saved:
        return first, saved["chosen"]


def main(words: list[str] | None = None) -> int:
    """Parse the command line and write; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.make_checkpoint", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"{name} of the shape")
    parser.add_argument(
        "--routing", default="demo", help='"demo", "random", or a file: .npz, trace or CSV'
    )
    parser.add_argument("--steps", type=int, help="tokens of recorded routing, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--aligned", action="store_true", help="page-aligned experts")
    arguments = parser.parse_args(words)
    given = {name: getattr(arguments, name) for name in SIZES}
    sizes = {name: value for name, value in given.items() if value is not None}
    try:
        shape, routed = replace(SHAPES[arguments.shape], **sizes), None
        if arguments.routing != "random":
            shape, routed = route(
                shape,
                DEMO if arguments.routing == "demo" else Path(arguments.routing),
                steps=arguments.steps,
                seed=arguments.seed,
                exact=arguments.top_k is not None,
            )
        make_checkpoint(
            arguments.directory,
            shape,
            routed=routed,
            seed=arguments.seed,
            aligned=arguments.aligned,
        )
    except MoestreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    how = "random routing" if routed is None else routed.words
    print(f"{arguments.directory}: top {shape.top_k} of {shape.experts} experts; {how}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
