"""Make or refresh `.venv` for scripts/demo and scripts/test; start them through those.

`.venv` belongs to these scripts: it is made anew when it does not run, has been moved, or holds
the wrong MLX. A stamp file says what was installed, so that a second run has nothing to do.
Needs the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
MADE = VENV / "moestream-venv.json"  # says where and for what the environment was made
LOG = VENV / "bootstrap.log"
LOG_LINES = 25  # of a failed installation, shown: enough for pip's reason


def main() -> None:
    parser = argparse.ArgumentParser(prog="bootstrap.py", description=__doc__.splitlines()[0])
    parser.add_argument("--dev", action="store_true", help="install the tools of the tests too")
    dev = parser.parse_args().dev
    refuse_unsupported(platform.system(), platform.machine())
    extra = choose_extra(os.environ, platform.system(), has_nvidia)
    with one_at_a_time():
        prepare(extra, dev=dev)


def prepare(extra: str, *, dev: bool) -> None:
    """Bring `.venv` up to date; returns at once when its stamps say that it is."""
    version = python_version(PYTHON)
    reason = why_anew(version, extra)
    if reason is None and any(
        stamp_matches(with_dev, extra, version) for with_dev in ((True,) if dev else (False, True))
    ):
        return
    if reason is not None:
        make_venv(reason, extra)
        version = python_version(PYTHON)
    install(extra, dev=dev)
    write_stamp(dev, extra, version)


def refuse_unsupported(system: str, machine: str) -> None:
    if system == "Darwin" and machine != "arm64":
        fail(
            "MLX needs Apple silicon and a native Python; this one is an Intel build. "
            "Name another in MOESTREAM_PYTHON"
        )
    if system not in ("Darwin", "Linux"):
        fail(f"MLX runs on macOS and Linux, not on {system}; on Windows use WSL")


def choose_extra(environ: Mapping[str, str], system: str, nvidia_works: Callable[[], bool]) -> str:
    """The extra of pyproject.toml that brings the right MLX; "" for none."""
    asked = environ.get("MOESTREAM_EXTRA")
    if asked is not None:
        known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        asked = "" if asked == "none" else asked
        if unknown := [name for name in asked.split(",") if name and name not in known]:
            names = ", ".join(["none", *known])
            fail(f"MOESTREAM_EXTRA={','.join(unknown)} is unknown; there are: {names}")
        return asked
    if system == "Darwin":
        return ""
    return "cuda13" if nvidia_works() else "cpu"


def has_nvidia() -> bool:
    """Whether there is an NVIDIA GPU with a driver that answers."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def python_version(python: Path) -> str | None:
    """The full version of an interpreter that runs and has pip; None for a broken one."""
    script = "import pip, platform; print(platform.python_version())"
    try:
        answer = subprocess.run(
            [python, "-I", "-c", script], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def why_anew(version: str | None, extra: str) -> str | None:
    """Why `.venv` has to be made from nothing; None when it can stay."""
    if not VENV.is_dir():
        return "there is none yet"
    if version is None:
        return "the old one does not work"
    minor = tuple(map(int, version.split(".")[:2]))
    if minor < (3, 11) or (os.environ.get("MOESTREAM_PYTHON") and minor != sys.version_info[:2]):
        return f"the old one has Python {version}"
    made = read_json(MADE)
    if not made:
        return "the old one was not finished or is not ours"
    if made.get("root") != str(ROOT):
        return "the folder was moved or copied"
    if made.get("extra") != extra:  # two kinds of MLX in one place overwrite each other
        return f"it is now meant for {extra or 'plain mlx'}"
    return None


def make_venv(reason: str, extra: str) -> None:
    say(f"making .venv with Python {platform.python_version()} ({reason})")
    if VENV.is_symlink() or VENV.is_file():
        VENV.unlink()
    elif VENV.exists():
        shutil.rmtree(VENV)
    made = subprocess.run(
        [sys.executable, "-m", "venv", VENV], capture_output=True, text=True, check=False
    )
    if made.returncode:
        lines = (made.stdout + made.stderr).strip().splitlines()
        fail("cannot make .venv: " + (lines[-1] if lines else "no reason given"))
    MADE.write_text(json.dumps({"root": str(ROOT), "extra": extra}) + "\n", encoding="utf-8")


def install(extra: str, *, dev: bool) -> None:
    """Install the project into `.venv`, editable; pip's output goes to the log."""
    extras = ",".join(name for name in (extra, "dev" if dev else "") if name)
    what = f"moestream[{extras}]" if extras else "moestream"
    say(f"installing {what} and what it needs (the first time takes a minute or more)")
    for with_dev in (False, True):  # half installed is not installed
        stamp_path(with_dev).unlink(missing_ok=True)
    start = time.monotonic()
    command = [str(PYTHON), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--editable", f".[{extras}]" if extras else "."]
    environ = {**os.environ, "PIP_USER": "0", "PYTHONUNBUFFERED": "1"}
    with (
        LOG.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            log.write(line)
            show_progress(line)
    show_progress("")
    if pip.returncode:
        tail = LOG.read_text(encoding="utf-8").splitlines()[-LOG_LINES:]
        fail("\n".join(["pip could not install it; the end of .venv/bootstrap.log:", *tail]))
    say(f"installed in {time.monotonic() - start:.0f} s")


def show_progress(line: str) -> None:
    """Rewrite one line of the terminal with what pip is doing; nothing elsewhere."""
    if not sys.stderr.isatty():
        return
    width = shutil.get_terminal_size().columns - 1
    text = line.strip()
    if text and not text.startswith(("Collecting", "Downloading", "Installing", "Building")):
        return
    print(f"\r\033[K{('  ' + text)[:width] if text else ''}", end="", file=sys.stderr, flush=True)


def stamp_path(dev: bool) -> Path:
    return VENV / ("moestream-dev.json" if dev else "moestream.json")


def stamp_of(extra: str, version: str | None) -> dict[str, str | None]:
    project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    return {"extra": extra, "python": version, "project": project}


def stamp_matches(dev: bool, extra: str, version: str | None) -> bool:
    stamp = read_json(stamp_path(dev))
    return stamp == stamp_of(extra, version) and (VENV / "bin" / "moestream").exists()


def read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_stamp(dev: bool, extra: str, version: str | None) -> None:
    stamp_path(dev).write_text(json.dumps(stamp_of(extra, version)) + "\n", encoding="utf-8")


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two runs never install into the same `.venv` at once: the second waits for the first."""
    folder = os.open(ROOT, os.O_RDONLY)  # locked itself, so that no lock file is left lying about
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another run to finish installing")
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(folder)


def say(text: str) -> None:
    print(f"moestream: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    say(text)
    raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise SystemExit(130) from None
