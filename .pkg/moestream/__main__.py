"""`python -m moestream` is the command `moestream`."""

from __future__ import annotations

from .runtime.cli import main

if __name__ == "__main__":
    main()
