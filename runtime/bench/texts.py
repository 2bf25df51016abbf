"""Prompts of a given number of tokens: plain sentences, another order for each repetition."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROUTING_KEY = "moestream_routing"
"""In the config of a checkpoint with recorded routing; or it has a file ``ROUTING_FILE``."""

ROUTING_FILE = "routing.json"

_SENTENCES = """
The ferry left the harbour a little after six, with two cyclists and a crate of hens on board.
Grandmother kept the seeds in paper bags and wrote the year on each of them.
If the oven is hot enough, the bread rises in the first ten minutes or not at all.
A map that shows every path is as hard to read as one that shows none.
The children built a dam of stones and mud, and by noon the brook had found a way around it.
Water expands when it freezes, which is why pipes burst in winter.
He tuned the old piano by ear, one string after the other, until it was dark.
Most of the letters were about money, some about the weather, and one about a lost dog.
The clock in the hall was wrong by eleven minutes, and everybody in the house knew it.
To find the leak, they put a little colour into the tank and waited.
Bees fly out when it is warmer than ten degrees and come home before the rain.
On the third day the wind turned, and the boats came back with more fish than they could sell.
The teacher asked how many corners a cube has, and then how many a ball has.
Nobody had opened the window since the painter moved out, and it took two of them to do it.
A short answer is often the result of a long thought.
The bridge carries forty tons, the sign says, but the farmer knew what his tractor weighs.
She counted the steps to the top of the tower and lost count at two hundred.
When the power failed, the whole street came out and looked at the stars.
The recipe asks for three eggs, a cup of sugar and patience.
Iron rusts faster near the sea, so the railings were painted every spring.
The owl sat on the chimney and turned its head without moving anything else.
They planted a row of poplars, since poplars grow fast, and oaks behind them, since oaks stay.
A good knot holds while it is needed and opens when it is not.
The train was late, the coffee was cold, and the news was good.
From the hill one could see both lakes, the small one blue and the large one grey.
It is easier to carry two buckets than one.
The mechanic listened to the engine for a minute and then asked for a smaller hammer.
Snow fell all night without a sound, and in the morning the fences were gone.
The museum has nine rooms, and the best picture hangs in the corridor.
After the meeting there were more questions than before, which was a good sign.
""".strip().splitlines()


def prompt_text(seed: int, sentences: int) -> str:
    """So many sentences; all of them in an order by the seed, then all in another one."""
    order = random.Random(seed)
    text: list[str] = []
    while len(text) < sentences:
        text += order.sample(_SENTENCES, len(_SENTENCES))
    return " ".join(text[:sentences])


def prompt_of(tokenizer: Any, count: int, seed: int, *, vocabulary: int) -> list[int]:
    """Token ids of a prompt; the same for the same arguments.

    Args:
        tokenizer: with ``encode``; None makes random tokens.
        count: of tokens, exactly.
        seed: of the order of the sentences; other seeds begin with other ones.
        vocabulary: number of tokens that there are.
    """
    if tokenizer is None:
        numbers = random.Random(seed)
        return [numbers.randrange(vocabulary) for _ in range(count)]
    sentences = count // 8 + 2
    ids: list[int] = list(tokenizer.encode(prompt_text(seed, sentences)))
    while len(ids) < count:
        sentences *= 2
        ids = list(tokenizer.encode(prompt_text(seed, sentences)))
    return ids[:count]


# -- recorded routing ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Routing:
    """Of a synthetic checkpoint whose tokens are the steps of a recording.

    Attributes:
        first_token: id of the first step; the others follow.
        steps: how many there are.
        description: where they come from.
    """

    first_token: int
    steps: int
    description: str

    def prompt(self, count: int, seed: int) -> list[int]:
        """Steps that follow each other from some place on; decoding goes on behind them."""
        begin = random.Random(seed).randrange(self.steps)
        return [self.first_token + (begin + at) % self.steps for at in range(count)]


def recorded_routing(directory: Path, config: Mapping[str, Any]) -> Routing | None:
    """What a checkpoint says about its routing; None when that is the model's own.

    Args:
        directory: of the checkpoint.
        config: its config.json.
    """
    about = config.get(ROUTING_KEY)
    try:
        if about is None:
            about = json.loads((directory / ROUTING_FILE).read_text(encoding="utf-8"))
        first, steps = int(about["first_token"]), int(about["steps"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return Routing(first, steps, str(about.get("description", "recorded"))) if steps > 0 else None
