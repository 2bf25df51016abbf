"""`moestream pack`: writes the experts of a model as page-aligned records, layer by layer."""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..io.disk import Disk
from ..io.manifest import MANIFEST, Manifest, StoredFile, StoredLayer, fingerprint
from .arguments import first_line, path_argument
from .assembly import Blueprint, draw_blueprint, make_record
from .errors import InvalidRequest, NotEnoughSpace, PackError
from .hub import resolve_model
from .pack_layer import pack_layer
from .pack_options import PackOptions, losses
from .pack_plan import LayerPlan, copied_files, made_from, plan_layers, store_config
from .pack_target import CONFIG, Target, check_target, checked_file, drive_errors
from .packed import load_residents
from .streams import leased_streams
from .trunk import (
    Shard,
    divide_trunk,
    index_bytes,
    trunk_arrays,
    write_shard,
)

INDEX = "model.safetensors.index.json"

SPARE = 16 << 20
"""Room left for headers, journal and the file system's own books (arbitrary)."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Packed:
    """What was made. Bytes and seconds.

    Attributes:
        store: its directory.
        layers, experts: how many.
        source_bytes: of the experts, as the source has them.
        expert_bytes: of their records, padding included.
        trunk_bytes: of everything else.
        resumed: layers that an interrupted call had finished.
        seconds: of this call.
        warnings: for the person who asked.
    """

    store: Path
    layers: int
    experts: int
    source_bytes: int
    expert_bytes: int
    trunk_bytes: int
    resumed: int
    seconds: float
    warnings: tuple[str, ...]


def pack_model(
    source: str | Path,
    target: str | Path,
    options: PackOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
    warn: Callable[[str], None] = lambda text: None,
    disk: Disk | None = None,
) -> Packed:
    """Make a packed store of a model, on the calling thread, one layer in memory at a time.

    Interrupted at any moment, the same call goes on with the first unfinished layer.

    Args:
        source: directory or Hub id of whatever mlx-lm can load: stacked or not, or a packed store.
        target: directory of the store, which must not be there.
        options: what to make of the experts.
        force: replace a store, and drop an unfinished one that was made otherwise.
        progress: called with (bytes, bytes in all).
        warn: called with each warning as soon as it is known.
        disk: stands in for the drive in fault tests.

    Raises:
        TargetExists: there is something already.
        NotEnoughSpace: before or while writing; what is finished stays for the next call.
        PackError: the drive fails otherwise.
        MoestreamError: the source cannot be loaded, or an option does not fit it.
    """
    started = time.monotonic()
    given = path_argument("target", target)
    if given is None:
        raise InvalidRequest("target=None must be the directory of the store")
    path = given.expanduser().absolute()
    check_target(path, force=force)
    directory = resolve_model(source).absolute()
    if path.resolve() == directory.resolve():
        raise InvalidRequest(f"{path} is the source itself; give another place for the store")
    with leased_streams():
        packer = _Packer(directory, path, options or PackOptions(), force, disk or Disk())
        for text in packer.warnings:
            warn(text)
        packer.run(progress)
        return packer.report(time.monotonic() - started)


class _Packer:
    """One call of ``pack_model``."""

    def __init__(
        self, source: Path, path: Path, options: PackOptions, force: bool, disk: Disk
    ) -> None:
        self._disk = disk
        self._path = path
        self._blueprint: Blueprint | None = draw_blueprint(source, widen=False)
        blueprint = self._blueprint
        source = blueprint.checkpoint.directory
        self._plans = plan_layers(blueprint, options)
        self._shards: dict[str, Shard] = divide_trunk(trunk_arrays(blueprint))
        self._trunk_bytes = sum(a.nbytes for s in self._shards.values() for a in s.values())
        self._small = {file.name: file for file in copied_files(source)}
        self._index = index_bytes(self._shards)
        self._config = json.dumps(store_config(blueprint, self._plans), indent=4).encode()
        sites = [plan.site for plan in self._plans]
        lost = losses(sites, {plan.site.path: plan.schemes for plan in self._plans})
        self.warnings = (lost,) if lost else ()
        self._source_bytes = sum(x.experts * x.record_bytes for x in blueprint.size.layers)
        self._experts = sum(site.experts for site in sites)
        self._expert_bytes = sum(plan.file_bytes for plan in self._plans)
        self._count = len(self._plans)
        self._resumed = 0
        self._done = 0
        with drive_errors(path, self._needed):
            made = made_from(blueprint, self._plans)
            self._target = Target(disk, path, made, force=force)
        self._made_from = made

    def run(self, progress: Progress | None) -> None:
        """Do what is left to do, and publish."""

        def advance(nbytes: int) -> None:
            self._done += nbytes
            if progress is not None:
                progress(self._done, self._total())

        with drive_errors(self._path, self._needed):
            if self._target.complete:
                self._resumed = self._count
            else:
                with self._target.opened():
                    self._write(advance)
            self._target.publish()

    def _total(self) -> int:
        return self._expert_bytes + self._trunk_bytes

    def _needed(self) -> int:
        return max(self._total() - self._done, 0)

    def _write(self, advance: Callable[[int], None]) -> None:
        target = self._target
        layers, trunk = target.finished_layers(advance), target.finished_files()
        self._resumed = len(layers)
        target.keep_only({layer.file for layer in layers.values()} | set(trunk))
        for name in trunk:
            advance(sum(array.nbytes for array in self._shards[name].values()))
        self._check_space()
        for plan in self._plans:
            if plan.site.path not in layers:
                try:
                    self._load(plan)
                    layer = pack_layer(self._disk, target.directory, plan, advance)
                except RuntimeError as error:  # MLX's, about the source's bytes or the memory
                    raise PackError(
                        f"cannot pack layer {plan.site.layer}: {first_line(error)}"
                    ) from error
                layers[layer.path] = layer
                target.add_layer(layer)
        ordered = tuple(layers[plan.site.path] for plan in self._plans)
        # From here on nothing but the shards holds the arrays of the trunk.
        self._plans.clear()
        self._blueprint = None
        gc.collect()
        for name, shard in self._shards.items():
            if name not in trunk:
                trunk[name] = write_shard(
                    self._disk, target.directory / name, shard, advance=advance
                )
                target.add_trunk(trunk[name])
            shard.clear()
            mx.clear_cache()
        self._write_small(ordered, tuple(trunk[name] for name in self._shards))

    def _check_space(self) -> None:
        free = shutil.disk_usage(self._target.directory).free
        needed = self._needed() + SPARE
        if free < needed:
            raise NotEnoughSpace(self._path, needed, free, begun=self._resumed > 0)

    def _load(self, plan: LayerPlan) -> None:
        """The experts of a packed source; those of other sources are loaded by MLX."""
        blueprint = self._blueprint
        assert blueprint is not None
        if blueprint.manifest is not None:
            load_residents([(plan.site, make_record(blueprint, plan.site))])

    def _write_small(self, layers: tuple[StoredLayer, ...], trunk: tuple[StoredFile, ...]) -> None:
        """Everything else, config.json last: with it the store can be opened."""
        target = self._target
        contents = {name: file.read_bytes() for name, file in self._small.items()}
        contents[INDEX] = self._index
        for name, data in contents.items():
            target.write(name, data)
        manifest = Manifest(
            layers=layers,
            trunk=trunk,
            files=tuple(checked_file(*item) for item in {**contents, CONFIG: self._config}.items()),
            fingerprint=fingerprint(target.directory / file.name for file in trunk),
            made_from=self._made_from,
        )
        target.write(MANIFEST, manifest.to_bytes())
        self._disk.sync_directory(target.directory)
        target.write(CONFIG, self._config)

    def report(self, seconds: float) -> Packed:
        """What was made."""
        return Packed(
            store=self._path,
            layers=self._count,
            experts=self._experts,
            source_bytes=self._source_bytes,
            expert_bytes=self._expert_bytes,
            trunk_bytes=self._trunk_bytes,
            resumed=self._resumed,
            seconds=seconds,
            warnings=self.warnings,
        )
