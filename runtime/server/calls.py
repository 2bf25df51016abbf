"""A request understood: the form that all three APIs share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..arguments import show
from ..engine import SamplingArguments
from .errors import ApiError, refused
from .fields import Fields


@dataclass(frozen=True, slots=True)
class Call:
    """What a client asks for.

    Attributes:
        sampling: arguments for ``Engine.stream``; without ``max_tokens``, what the context holds.
        messages: of a chat, as chat templates take them.
        prompts: of text completions, each a text or token ids.
        tools: that the model may call, in OpenAI's form.
        template: further arguments of the chat template.
        continued: the last message is the beginning of the answer.
        one_tool: the answer ends behind its first tool call.
        choices: answers to each prompt.
        stream: the answer is sent as it comes.
        usage: a stream ends with the counts of tokens.
        echo: the text of a completion begins with its prompt.
    """

    sampling: SamplingArguments
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompts: tuple[str | tuple[int, ...], ...] = ()
    tools: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)
    continued: bool = False
    one_tool: bool = False
    choices: int = 1
    stream: bool = False
    usage: bool = False
    echo: bool = False


def check_model(fields: Fields, name: str) -> None:
    """Refuse a request for another model than the one that is served."""
    asked = fields.text("model")
    if asked is not None and asked != name:
        message = f"the model {show(asked)} is not served here; {show(name)} is"
        raise ApiError(404, message, param="model", code="model_not_found")


def read_sampling(fields: Fields, defaults: SamplingArguments, *, stop: str) -> SamplingArguments:
    """The sampling arguments of a body; bounds are the engine's to check.

    Args:
        fields: of the body.
        defaults: of arguments that are not there.
        stop: name of the field with the stop texts.
    """
    sampling = defaults.copy()
    if (temperature := fields.real("temperature")) is not None:
        sampling["temperature"] = temperature
    if (top_p := fields.real("top_p")) is not None:
        sampling["top_p"] = top_p
    if (min_p := fields.real("min_p")) is not None:
        sampling["min_p"] = min_p
    if (top_k := fields.whole("top_k", least=-1)) is not None:
        sampling["top_k"] = max(top_k, 0)  # -1 is how some clients switch it off
    if (seed := fields.whole("seed", least=-(2**63), most=2**64 - 1)) is not None:
        sampling["seed"] = seed % 2**64
    if (repetition := fields.real("repetition_penalty")) is not None:
        sampling["repetition_penalty"] = repetition
    if (presence := fields.real("presence_penalty")) is not None:
        sampling["presence_penalty"] = presence
    if (frequency := fields.real("frequency_penalty")) is not None:
        sampling["frequency_penalty"] = frequency
    if (ignore_eos := fields.flag("ignore_eos")) is not None:
        sampling["ignore_eos"] = ignore_eos
    if (biases := fields.table("logit_bias")) is not None:
        sampling["logit_bias"] = _biases(fields, biases)
    if stops := fields.texts(stop):
        sampling["stop"] = stops
    return sampling


def limit_tokens(sampling: SamplingArguments, limit: int | None) -> None:
    """Put the most tokens of an answer into sampling arguments that have none of their own."""
    if limit is not None:
        sampling["max_tokens"] = limit


def _biases(fields: Fields, biases: dict[str, Any]) -> dict[int, float]:
    values = Fields(biases, fields.path("logit_bias"))
    read: dict[int, float] = {}
    for token in biases:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise refused(f"logit_bias names {show(token)}, which is no token id", "logit_bias")
        if (bias := values.real(token)) is not None:
            read[int(token)] = bias
    return read
