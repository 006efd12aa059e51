#!/bin/sh
# make-venv.sh DIR: creates a Python virtual environment with pip in it, on a machine that may have python3 alone.
# Debian's python3 cannot put pip into one until the package python3-venv is there: it is installed where we may, else
# pip is taken out of Debian's package of it, which any user may download.
set -eu
dir=$1
[ -x "$dir/bin/python" ] && "$dir/bin/python" -m pip --version >/dev/null 2>&1 && exit 0

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "kvscout needs Python 3.11 or newer; python3 is $(python3 --version 2>&1)." >&2
    exit 1
}
try() { rm -rf "$dir"; python3 -m venv "$dir" >/dev/null 2>&1; }

pip_of_debian() {
    place=$(mktemp -d)
    mkdir -p "$place/state/lists/partial" "$place/cache/archives/partial"
    as_user="-qq -o Dir::State=$place/state -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache=$place/cache"
    { apt-get $as_user update 2>"$place/errors" || { cat "$place/errors" >&2 && false; }; } &&
        (cd "$place" && apt-get $as_user download python3-pip-whl) &&
        dpkg-deb -x "$place"/python3-pip-whl_*.deb "$place/unpacked" &&
        rm -rf "$dir" && python3 -m venv --without-pip "$dir" &&
        wheel=$(echo "$place"/unpacked/usr/share/python-wheels/pip-*.whl) &&
        "$dir/bin/python" "$wheel/pip" install --quiet --no-index "$wheel" && done=true || done=false
    rm -rf "$place"
    $done
}

try && exit 0
if command -v uv >/dev/null 2>&1; then
    rm -rf "$dir"
    exec uv venv --quiet --seed "$dir"
fi
as_root=""
[ "$(id -u)" -eq 0 ] || as_root="sudo -n"
if command -v apt-get >/dev/null 2>&1; then
    if $as_root true 2>/dev/null; then
        echo "python3 cannot create environments: installing the Debian package python3-venv"
        $as_root apt-get update -qq
        $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
        try && exit 0
    else
        echo "python3 cannot put pip into an environment: taking it out of the Debian package python3-pip-whl"
        pip_of_debian && exit 0
    fi
fi
rm -rf "$dir"
echo "python3 cannot create virtual environments here. On Debian or Ubuntu: apt-get install python3-venv" >&2
exit 1
