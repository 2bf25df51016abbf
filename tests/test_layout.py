"""The shape of the project: linked folders, direction of imports, a light facade, shipped data."""

from __future__ import annotations

import ast
import importlib
import io
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata, resources
from pathlib import Path

import pytest

import moestream

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / ".pkg" / "moestream"
FOLDERS = ("io", "models", "runtime")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
OUTSIDE = [
    path
    for folder in ("scripts", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "__pycache__" not in path.parts
]
DEMO_MODEL = "demo-moe-4bit"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every import of a file, also those for type checkers: (absolute module, relative level)."""
    relative = path.relative_to(ROOT)
    package = ["moestream", *relative.parts[:-1]] if relative.parts[0] in FOLDERS else []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *([node.module] if node.module else [])]
            for alias in node.names:  # `from .. import io` names a module too
                yield ".".join([*module, alias.name]), node.level


def run_python(code: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )


# -- links and folders


def test_package_links_the_folders_of_the_root() -> None:
    links = {path.name for path in PACKAGE.iterdir() if path.is_symlink()}
    assert links == set(FOLDERS)
    for name in FOLDERS:
        assert (PACKAGE / name).readlink() == Path("..", "..", name)
        assert (PACKAGE / name).resolve() == ROOT / name


def test_facade_names_come_from_the_folders() -> None:
    for name, module in moestream._MODULES.items():
        _, folder, *rest = module.split(".")
        assert folder in FOLDERS, name
        assert rest, f"{name} comes from a module, not from a package"


@pytest.mark.parametrize("folder", ["", "io"])
def test_no_init_where_it_would_hide_the_standard_library(folder: str) -> None:
    # mypy looks in its working directory first: a package `io` there would replace the real one.
    assert not (ROOT / folder / "__init__.py").exists()


def test_standard_io_is_found_from_the_root() -> None:
    done = run_python("import io; print(io.StringIO('fine').read())", cwd=ROOT)
    assert (done.stdout, done.stderr) == ("fine\n", "")
    assert not hasattr(io, "__path__")


def test_folders_are_not_imported_by_their_bare_names() -> None:
    # A module imported twice under two names has every class twice.
    assert not {"runtime", "models"} & set(sys.modules)
    for path in OUTSIDE:
        bare = {module for module, _ in imports(path) if module.split(".")[0] in FOLDERS}
        assert all(name.startswith("io.") and hasattr(io, name[3:]) for name in bare - {"io"}), (
            f"{name_of(path)} imports {bare}: import moestream.… instead"
        )


def test_bare_runtime_fails_from_the_root() -> None:
    # Cross-package relative imports see to it; `models` has none and is left to the test above.
    crossing = [
        path.stem
        for path in sorted((ROOT / "runtime").glob("*.py"))
        if any(level == 2 for _, level in imports(path))
    ]
    done = run_python(f"import runtime.{crossing[0]}", cwd=ROOT)
    assert done.returncode != 0
    assert "attempted relative import beyond top-level package" in done.stderr


# -- who imports whom


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_inside_the_package_are_relative(path: Path) -> None:
    absolute = [m for m, level in imports(path) if not level and m.split(".")[0] == "moestream"]
    assert not absolute
    assert not [m for m, level in imports(path) if not level and m.split(".")[0] in FOLDERS[1:]]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_dependencies_point_one_way(path: Path) -> None:
    forbidden = {
        "io": ("mlx", "mlx_lm", "moestream.models", "moestream.runtime"),
        "models": ("moestream.runtime",),
        "runtime": (),
    }[path.relative_to(ROOT).parts[0]]
    wrong = [
        module
        for module, _ in imports(path)
        if any(module == banned or module.startswith(banned + ".") for banned in forbidden)
    ]
    assert not wrong


def test_io_runs_without_mlx() -> None:
    modules = [f"moestream.io.{path.stem}" for path in sorted((ROOT / "io").glob("*.py"))]
    done = run_python(
        f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
    loaded = {{"mlx", "mlx_lm", "moestream.models", "moestream.runtime"}} & set(sys.modules)
    assert not loaded, (name, loaded)
""",
        cwd=ROOT / "tests",
    )
    assert done.returncode == 0, done.stderr


# -- the facade


def test_import_is_light(tmp_path: Path) -> None:
    code = (
        "import sys; before = set(sys.modules); import moestream; print(*set(sys.modules) - before)"
    )
    loaded = run_python(code, cwd=tmp_path).stdout.split()
    assert "moestream" in loaded
    assert not [
        name for name in loaded if name.startswith(("moestream.", "mlx", "numpy", "asyncio"))
    ]


def test_table_types_and_all_agree() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.asname or alias.name: f".{node.module}"
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == moestream._MODULES
    assert moestream.__all__ == sorted([*moestream._MODULES, "__version__"])


@pytest.mark.parametrize("name", moestream.__all__)
def test_public_name_resolves(name: str) -> None:
    value = getattr(moestream, name)
    assert name in dir(moestream)
    if name != "__version__":
        assert value is getattr(
            importlib.import_module(moestream._MODULES[name], "moestream"), name
        )
        assert value.__name__ == name


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'moestream' has no attribute 'nonsense'"):
        moestream.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_version() -> None:
    assert moestream.__version__ == metadata.version("moestream")


def test_module_is_the_command() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="moestream")
    assert script.value == "moestream.runtime.cli:main"
    main = ast.parse((PACKAGE / "__main__.py").read_text(encoding="utf-8"))
    assert "from .runtime.cli import main" in ast.unparse(main)


# -- shipped data


def test_demo_model_is_shipped() -> None:
    folder = resources.files("moestream") / "data" / DEMO_MODEL
    names = {entry.name for entry in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "MODEL_CARD.md"} <= names
    assert "Apache-2.0" in (folder / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_package_is_typed() -> None:
    assert (resources.files("moestream") / "py.typed").is_file()
