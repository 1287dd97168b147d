#!/bin/sh
# Makes or refreshes a virtual environment and installs this package into it, editable.
#
#   scripts/make_venv.sh FOLDER EXTRAS [VERSION ...] [-- pip argument ...]
#
# EXTRAS: extras of pyproject.toml, as in "dev" or "dev,ray". VERSIONS: the Python versions that will do, the
# preferred first; default 3.12 3.13 3.11, or what `python3` is if that is one of them. The environment
# variable PYTHON names an interpreter to use instead. Arguments after -- go to `pip install` as they are.
set -eu

folder=$1
extras=$2
shift 2
versions=
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
    versions="$versions $1"
    shift
done
[ $# -eq 0 ] || shift
default_versions=" 3.12 3.13 3.11"
versions=${versions:-$default_versions}

# "3.12" for an interpreter that starts; nothing for one that is missing, broken or a launcher without a Python.
version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null || true
}

is_wanted() {
    case " $versions " in *" $1 "*) [ -n "$1" ] ;; *) return 1 ;; esac
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_wanted "$(version_of "$PYTHON")" && echo "$PYTHON"
        return
    fi
    for candidate in python3 python; do
        is_wanted "$(version_of $candidate)" && echo $candidate && return
    done
    for version in $versions; do
        for candidate in "python$version" \
            "$(dirname "$(command -v "python$version" || echo none)")"/../versions/"$version".*/bin/python \
            "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/"$version".*/bin/python \
            "/usr/bin/python$version" "/usr/local/bin/python$version" "/opt/homebrew/bin/python$version"; do
            [ "$(version_of "$candidate")" = "$version" ] && echo "$candidate" && return
        done
    done
}

if ! is_wanted "$(version_of "$folder/bin/python")"; then
    python=$(find_python) || true
    if [ -z "$python" ]; then
        echo "make_venv: no Python of version$versions found (python3 here is '$(version_of python3)')." >&2
        echo "make_venv: install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2
        exit 1
    fi
    echo "make_venv: $folder with Python $(version_of "$python")"
    if ! "$python" -m venv --clear "$folder"; then
        echo "make_venv: '$python -m venv $folder' failed. On Debian and Ubuntu: apt install python3-venv." >&2
        exit 1
    fi
fi

echo "make_venv: installing .[$extras] into $folder (the first time takes a few minutes)"
"$folder/bin/python" -m pip install -qq --disable-pip-version-check --no-input --editable ".[$extras]" "$@"
