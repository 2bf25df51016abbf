# Sourced by scripts/demo and scripts/test. Finds a Python, then has bootstrap.py make `.venv`.
# Sets root (the repository) and venv_python. Keeps to bash 3.2, which macOS has.

root=$(CDPATH="" cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv_python=$root/.venv/bin/python

# Prints the first Python that is new enough and can make virtual environments.
find_python() {
    local name path answer too_old='' no_venv=''
    local names=(python3.13 python3.12 python3.11 python3.14 python3 python)
    if [ -n "${MOESTREAM_PYTHON:-}" ]; then
        names=("$MOESTREAM_PYTHON")
    fi
    for name in "${names[@]}"; do
        path=$(command -v "$name") || continue
        # Version managers leave commands behind that start no Python: those answer nothing.
        answer=$("$path" -I -c '
import sys
if sys.version_info < (3, 11):
    print("old %d.%d" % sys.version_info[:2])
else:
    try:
        import ensurepip, venv
        print("good")
    except ImportError:
        print("no-venv")
' 2>/dev/null) || continue
        case $answer in
        good)
            printf '%s\n' "$path"
            return 0
            ;;
        no-venv) no_venv=${no_venv:-$path} ;;
        old*) too_old="$too_old $path (${answer#old }),"
        esac
    done
    if [ -n "$no_venv" ]; then
        echo "moestream: $no_venv cannot make virtual environments: install its venv module" \
            "(Debian and Ubuntu: apt install python3-venv) and try again" >&2
    elif [ -n "${MOESTREAM_PYTHON:-}" ]; then
        too_old=${too_old%,}
        echo "moestream: MOESTREAM_PYTHON=$MOESTREAM_PYTHON is no Python 3.11 or newer;" \
            "found:${too_old:- nothing that runs}" >&2
    else
        too_old=${too_old%,}
        echo "moestream: needs Python 3.11 or newer; found:${too_old:- none}." \
            "Install one, or name it in MOESTREAM_PYTHON" >&2
    fi
    return 1
}

# bootstrap [--dev]: makes or refreshes .venv; a fraction of a second when nothing has changed.
bootstrap() {
    local python
    python=$(find_python) || return 1
    "$python" "$root/scripts/bootstrap.py" "$@"
}
