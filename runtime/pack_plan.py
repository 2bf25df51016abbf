"""What a pack is going to write, worked out before anything is read or written."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..io.layout import Layout, StoredComponent, lay_out
from ..io.manifest import FORMAT, MANIFEST, Quantization, fingerprint
from ..io.records import ITEM_BYTES
from ..models.errors import UnsupportedModel
from ..models.experts import ExpertSite, projections
from ..models.quantizing import Scheme, scheme_of, shapes
from .assembly import Blueprint
from .pack_options import PackOptions, choose_schemes
from .pack_order import places_by_layer
from .tracefile import read_trace
from .trunk import code_of

COPIED = (
    "*.json",
    "*.jsonl",
    "*.jinja",
    "*.txt",
    "*.md",
    "*.py",
    "*.tiktoken",
    "tokenizer.model",
    "LICENSE*",
)
"""Files that go along with the model: tokenizer, templates, card and licence."""

_WRITTEN = (
    "config.json",
    "model.safetensors.index.json",
    "hf_quant_config.json",
    "pytorch_model.bin.index.json",
    MANIFEST,
)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer becomes.

    Attributes:
        site: its switch module.
        schemes: projection -> new scheme; None keeps what it has.
        file: relative to the store.
        layout: of a record.
        place: of each expert among the records; None: in order.
    """

    site: ExpertSite
    schemes: Mapping[str, Scheme | None]
    file: str
    layout: Layout
    place: tuple[int, ...] | None

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self.site.experts * self.layout.stride

    @property
    def quantization(self) -> dict[str, Quantization | None]:
        """Projection -> how it is quantized in the store."""
        entries: dict[str, Quantization | None] = {}
        for name, linear in projections(self.site.module).items():
            scheme = self.schemes[name] or scheme_of(linear)
            entries[name] = None if scheme is None else scheme.to_config()
        return entries


def plan_layers(blueprint: Blueprint, options: PackOptions) -> list[LayerPlan]:
    """Every MoE layer in the order of the forward pass.

    Raises:
        InvalidRequest: an option does not fit the model.
        UnsupportedModel: its experts are of a type that has no place in a record.
    """
    sites = [use.site for use in blueprint.uses]
    schemes = choose_schemes(options, sites)
    places: dict[int, tuple[int, ...]] = {}
    if options.order is not None:
        experts = {site.layer: site.experts for site in sites}
        places = places_by_layer(read_trace(options.order), experts, options.order_by)
    plans: list[LayerPlan] = []
    taken: set[str] = set()
    for site in sites:
        chosen = schemes[site.path]
        file = f"experts/layer-{site.layer:03}.bin"
        if file in taken:  # two expert modules in one layer
            file = f"experts/layer-{site.layer:03}-{len(taken):03}.bin"
        taken.add(file)
        layout = lay_out(_components(blueprint.checkpoint.directory, site, chosen))
        plans.append(LayerPlan(site, chosen, file, layout, places.get(site.layer)))
    return plans


def _components(
    directory: Path, site: ExpertSite, schemes: Mapping[str, Scheme | None]
) -> list[StoredComponent]:
    components = []
    for projection, linear in projections(site.module).items():
        for name, (shape, dtype) in shapes(linear, schemes[projection]).items():
            code = code_of(dtype)
            if code not in ITEM_BYTES:
                raise UnsupportedModel(directory, f"{site.path}.{projection}.{name} is {code}")
            components.append(StoredComponent(f"{projection}.{name}", code, shape))
    return components


def store_config(blueprint: Blueprint, plans: Sequence[LayerPlan]) -> dict[str, Any]:
    """config.json of the store: the source's, with the quantization of every expert module."""
    config = copy.deepcopy(blueprint.checkpoint.config)
    entries = {
        f"{plan.site.path}.{name}": dict(value)
        for plan in plans
        for name, value in plan.quantization.items()
        if value is not None
    }
    quantization = copy.deepcopy(blueprint.lazy.config.get("quantization"))
    if quantization is None:
        if not entries:
            return config
        # Only a default: whatever is not named is quantized as its tensors show, or not at all.
        first = next(iter(entries.values()))
        quantization = {key: first[key] for key in ("group_size", "bits", "mode")}
    config["quantization"] = config["quantization_config"] = {**quantization, **entries}
    return config


def copied_files(directory: Path) -> list[Path]:
    """The files of the source that go along."""
    found = {path for pattern in COPIED for path in directory.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.name not in _WRITTEN)


def made_from(blueprint: Blueprint, plans: Sequence[LayerPlan]) -> str:
    """Digest of everything that the content of the store depends on."""
    checkpoint = blueprint.checkpoint
    digest = blake2b(digest_size=16)
    digest.update(fingerprint(checkpoint.files).encode())
    for path in (checkpoint.directory / "config.json", *copied_files(checkpoint.directory)):
        digest.update(path.name.encode() + path.read_bytes())
    if blueprint.manifest is not None:
        digest.update(blueprint.manifest.to_bytes())
    layers = [
        [
            plan.site.path,
            plan.file,
            {name: scheme and asdict(scheme) for name, scheme in plan.schemes.items()},
            plan.place,
        ]
        for plan in plans
    ]
    digest.update(json.dumps([FORMAT, layers]).encode())
    return digest.hexdigest()
