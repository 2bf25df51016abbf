"""Reads the fields of a request's body, each checked for its type and bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from ..arguments import show
from .errors import refused

T = TypeVar("T")


class Fields:
    """An object of a body. A field that is null counts as absent.

    Args:
        values: the decoded object.
        path: where it stands in the body, for messages.

    All methods raise ``ApiError`` (400) naming the field when it has the wrong type.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def path(self, name: str) -> str:
        """Where a field stands in the body."""
        return f"{self._path}.{name}" if self._path else name

    def raw(self, name: str) -> Any:
        """The value as it came, None when absent."""
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        """A text."""
        return self._typed(name, str, "a text")

    def needed_text(self, name: str) -> str:
        """A text that has to be there."""
        value = self.text(name)
        if value is None:
            raise refused(f"{self.path(name)} is missing", self.path(name))
        return value

    def flag(self, name: str) -> bool | None:
        """true or false."""
        return self._typed(name, bool, "true or false")

    def whole(self, name: str, *, least: int, most: int | None = None) -> int | None:
        """A whole number within bounds."""
        value = self._typed(name, int, "a whole number")
        if value is None:
            return None
        if value < least or (most is not None and value > most):
            bound = f"at least {least}" if most is None else f"from {least} to {most}"
            raise self.wrong(name, bound)
        return value

    def real(self, name: str) -> float | None:
        """A finite number; its bounds are the engine's to check."""
        value = self._values.get(name)
        if value is None:
            return None
        try:
            number = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.wrong(name, "a finite number")
        return number

    def items(self, name: str) -> list[Any] | None:
        """A list."""
        return self._typed(name, list, "a list")

    def table(self, name: str) -> dict[str, Any] | None:
        """An object."""
        return self._typed(name, dict, "an object")

    def part(self, name: str) -> Fields:
        """The fields of an object; an empty one when absent."""
        return Fields(self.table(name) or {}, self.path(name))

    def parts(self, name: str) -> Iterator[Fields]:
        """The fields of each object of a list."""
        for index, item in enumerate(self.items(name) or ()):
            path = f"{self.path(name)}[{index}]"
            if not isinstance(item, dict):
                raise refused(f"{path} must be an object, not {show(item)}", path)
            yield Fields(item, path)

    def texts(self, name: str) -> list[str]:
        """A text or a list of texts."""
        value = self._values.get(name)
        if value is None:
            return []
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            raise self.wrong(name, "a text or a list of texts")
        return listed

    def refuse(self, name: str, why: str, *allowed: Any) -> None:
        """Raise unless the field is absent, or one of the values that ask for nothing special."""
        value = self._values.get(name)
        if value is not None and not any(
            type(value) is type(other) and value == other for other in allowed
        ):
            raise refused(f"{self.path(name)}: {why}", self.path(name), "unsupported")

    def wrong(self, name: str, wanted: str) -> Exception:
        """The error about a field of the wrong type or value."""
        path = self.path(name)
        return refused(f"{path} must be {wanted}, not {show(self._values.get(name))}", path)

    def _typed(self, name: str, kind: type[T], what: str) -> T | None:
        value = self._values.get(name)
        if value is None:
            return None
        if type(value) is kind:  # true is no whole number
            return value
        raise self.wrong(name, what)
