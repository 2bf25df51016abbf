"""Suites: files with cells."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..plan import parse_size
from .cells import CACHES, KINDS, OUR_ARMS, Budget, Cell, expand
from .errors import SuiteInvalid

SUITES = files(__package__) / "suites"


@dataclass(frozen=True, slots=True)
class Suite:
    """Cells with what they have in common.

    Attributes:
        name: of the suite.
        title: what it is for.
        cells: in the order of the file.
        model: "demo" for the model of the package; None when one has to be named.
        record_mb: size that records are padded to; None leaves them as they are.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    model: str | None = None
    record_mb: float | None = None


def suite_names() -> list[str]:
    """The suites that come with the package."""
    names = (entry.name for entry in SUITES.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def load_suite(name: str) -> Suite:
    """A suite by its name, or from a file.

    Raises:
        SuiteInvalid: there is none, or it says something that makes no sense.
    """
    path = Path(name)
    if name in suite_names():
        text = (SUITES / f"{name}.toml").read_text(encoding="utf-8")
    elif path.suffix == ".toml":
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SuiteInvalid(path, f"cannot be read: {error}") from error
    else:
        known = ", ".join(suite_names())
        raise SuiteInvalid(path, f"no suite; there are {known}, or give a file that ends in .toml")
    return parse_suite(path.stem, text, path)


def parse_suite(name: str, text: str, path: Path) -> Suite:
    """Understand the text of a suite's file, which errors call ``path``."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SuiteInvalid(path, str(error)) from error
    head = _Table(table, path, "the file")
    tables = head.take("cells", _tables)
    suite = Suite(
        name,
        head.take("title", _text, ""),
        tuple(
            cell for number, entry in enumerate(tables, 1) for cell in _cells(entry, path, number)
        ),
        head.take("model", _text, None),
        head.take("record_mb", _positive, None),
    )
    head.end()
    if not suite.cells:
        raise SuiteInvalid(path, "there are no cells")
    return suite


class _Table:
    """A table of a file whose entries are all taken, and checked."""

    def __init__(self, values: Mapping[str, Any], path: Path, where: str) -> None:
        self._values = dict(values)
        self._path = path
        self._where = where

    def take(self, name: str, check: Callable[[Any], Any], *default: Any) -> Any:
        if name not in self._values:
            if default:
                return default[0]
            self.refuse(f"{name} is missing")
        value = self._values.pop(name)
        try:
            return check(value)
        except (TypeError, ValueError) as error:
            raise self.refusal(f"{name} = {value!r}: {error}") from None

    def refusal(self, problem: str) -> SuiteInvalid:
        return SuiteInvalid(self._path, f"{self._where}: {problem}")

    def refuse(self, problem: str) -> None:
        raise self.refusal(problem)

    def end(self) -> None:
        if self._values:
            self.refuse(f"there is no {', '.join(self._values)}")


def _cells(entry: Mapping[str, Any], path: Path, number: int) -> list[Cell]:
    table = _Table(entry, path, f"cells {number}")
    kind = table.take("kind", _one_of(KINDS))
    budgets = [
        Budget(**{field.name: value})
        for field in fields(Budget)
        for value in table.take(field.name, _list_of(BUDGET_CHECKS[field.name]), ())
    ]
    if not budgets:
        table.refuse("give slots, share or memory")
    caches = table.take("cache", _list_of(_one_of(CACHES)), ("cold",))
    arms = table.take("arms", _list_of(_one_of(OUR_ARMS)), OUR_ARMS)
    counts: dict[str, Any] = {"repeats": table.take("repeats", count, 5)}
    if kind != "prefill":
        counts["tokens"] = table.take("tokens", count, 48)
    if kind == "callers":
        counts["caller_context"] = table.take("context", count, 16)
        counts["callers"] = table.take("callers", _list_of(count))
    else:
        counts["contexts" if kind == "decode" else "prefills"] = table.take(
            "context", _list_of(count)
        )
    table.end()
    return expand(budgets, caches, arms, **counts)


def count(value: Any) -> int:
    """A whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("must be a whole number above 0")
    return value


def _positive(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ValueError("must be above 0")
    return float(value)


def _share(value: Any) -> float:
    if _positive(value) > 1:
        raise ValueError("must be at most 1")
    return float(value)


def _memory(value: Any) -> str:
    if _text(value) != "all":
        parse_size(value)
    return str(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value


def _tables(value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError("must be tables, [[cells]]")
    return value


def _one_of(allowed: Sequence[str]) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"must be of {', '.join(allowed)}")
        return str(value)

    return check


def _list_of(check: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: tuple(
        check(one) for one in (value if isinstance(value, list) else [value])
    )


BUDGET_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "slots": count,
    "share": _share,
    "memory": _memory,
}
