#!/bin/sh
# make-venv.sh DIR: creates a Python virtual environment with pip in it, on a machine that may have python3 alone.
# Debian's python3 cannot do that until the package python3-venv is there: it is installed if we may.
set -eu
dir=$1
[ -x "$dir/bin/python" ] && "$dir/bin/python" -m pip --version >/dev/null 2>&1 && exit 0

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "kvscout needs Python 3.11 or newer; python3 is $(python3 --version 2>&1)." >&2
    exit 1
}
try() { rm -rf "$dir"; python3 -m venv "$dir" >/dev/null 2>&1; }

try && exit 0
if command -v uv >/dev/null 2>&1; then
    rm -rf "$dir"
    exec uv venv --quiet --seed "$dir"
fi
as_root=""
[ "$(id -u)" -eq 0 ] || as_root="sudo -n"
if command -v apt-get >/dev/null 2>&1 && $as_root true 2>/dev/null; then
    echo "python3 cannot create environments: installing the Debian package python3-venv"
    $as_root apt-get update -qq
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
    try && exit 0
fi
rm -rf "$dir"
echo "python3 cannot create virtual environments here. On Debian or Ubuntu: apt-get install python3-venv" >&2
exit 1
