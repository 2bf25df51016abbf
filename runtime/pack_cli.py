"""The command `moestream pack`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import cli_options as options
from .terminal import interrupts_held, note, print_json, progress_bar

if TYPE_CHECKING:
    from ..io.verify import Verified
    from .pack_options import PackOptions
    from .packing import Packed

_WHAT, _ORDER = "What to make of the experts", "Order on disk"
_SHOWN = 20
"""Damages that are listed one by one."""


def pack(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="The model: a directory, a Hub id, or a packed store."),
    ],
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="DST", help="Directory of the packed store; not with --verify alone."
        ),
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(
            metavar="BITS",
            help="Quantize the experts: 4, or by projection gate=3,up=3,down=4 (fc1=, fc2=); "
            "'keep' leaves one as it is.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    mode: Annotated[
        Literal["affine", "mxfp4", "mxfp8", "nvfp4"] | None,
        typer.Option(help="Kind of quantization; affine unless given.", rich_help_panel=_WHAT),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Weights that share a scale; 64 for affine unless given.", rich_help_panel=_WHAT
        ),
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYERS:BITS",
            help="Other bits in some layers, such as 0-3,44-47:6 or 0:gate=8,down=6 or 0:keep; "
            "may be repeated, the last one that names a layer wins.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    order: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help="Order the experts by the routing in a trace.",
            rich_help_panel=_ORDER,
        ),
    ] = None,
    order_by: Annotated[
        Literal["frequency", "coactivation"],
        typer.Option(
            help="The most used first, or each behind what it is used together with.",
            rich_help_panel=_ORDER,
        ),
    ] = "frequency",
    force: Annotated[
        bool, options.flag("--force", "Replace a store, or begin an unfinished one anew.")
    ] = False,
    verify: Annotated[
        bool,
        options.flag("--verify", "Check a store against its checksums: DST, or SRC where alone."),
    ] = False,
    json_output: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Write a model as a packed store: one page-aligned record for each expert.

    A store is opened like any model. An interrupted pack goes on where it stopped when the same
    command is given again.
    """
    with interrupts_held():
        from .pack_options import PackOptions

    wanted = PackOptions(bits, mode, group_size, tuple(layers or ()), order, order_by)
    if target is None:
        if not verify:
            raise typer.BadParameter("give the directory of the store, DST, too")
        if wanted != PackOptions() or force:
            raise typer.BadParameter("--verify alone only reads: give DST to make a store")
        report = _verify(Path(source))
        if json_output:
            print_json({"store": source, **_verified(report)})
        else:
            _print_verified(source, report)
        raise typer.Exit(1 if report.damages else 0)
    packed = _pack(source, target, wanted, force=force, quiet=json_output)
    checked = _verify(packed.store) if verify else None
    if json_output:
        document = {**asdict(packed), "store": str(packed.store)}
        if checked is not None:
            document["verified"] = _verified(checked)
        print_json(document)
    else:
        _print_packed(packed)
        if checked is not None:
            _print_verified(str(packed.store), checked)
    if checked is not None and checked.damages:
        raise typer.Exit(1)


def _pack(source: str, target: Path, wanted: PackOptions, *, force: bool, quiet: bool) -> Packed:
    with interrupts_held():
        from .packing import pack_model

    try:
        with progress_bar("packing", sizes=True, late=True) as progress:
            return pack_model(
                source,
                target,
                wanted,
                force=force,
                progress=progress,
                warn=(lambda text: None) if quiet else note,
            )
    except KeyboardInterrupt:
        note("stopped: the same command again goes on where this one stopped")
        raise


def _verify(directory: Path) -> Verified:
    from ..io.verify import verify_store

    with progress_bar("verifying", sizes=True) as progress:
        return verify_store(directory, progress)


def _verified(report: Verified) -> dict[str, Any]:
    return {
        "records": report.records,
        "bytes": report.nbytes,
        "damages": [damage.to_json() for damage in report.damages],
    }


def _print_packed(packed: Packed) -> None:
    from .cli_output import size

    went_on = f", {packed.resumed} of them finished before" if packed.resumed else ""
    typer.echo(
        f"packed {packed.experts} experts of {packed.layers} layers{went_on}: "
        f"{size(packed.expert_bytes)} (before {size(packed.source_bytes)}), "
        f"trunk {size(packed.trunk_bytes)}"
    )
    typer.echo(f"Next: moestream run {packed.store} -p 'Once upon a time'")


def _print_verified(store: str, report: Verified) -> None:
    from .cli_output import size

    if not report.damages:
        typer.echo(f"{store} is what was packed: {report.records} records, {size(report.nbytes)}")
        return
    for damage in report.damages[:_SHOWN]:
        typer.echo(str(damage))
    if len(report.damages) > _SHOWN:
        typer.echo(f"and {len(report.damages) - _SHOWN} more")
    note(f"{store} is damaged in {len(report.damages)} places: pack the model again")
