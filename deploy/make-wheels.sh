#!/bin/sh
# make-wheels.sh PYTHON DIR: fills DIR with the wheels of an image: kvscout's, built here with the extension, and those of the
# packages it needs, which are those of the lock files or none. PYTHON has pip, and belongs to an environment of its own.
set -eu
python=$1 dir=$2
pinned="--quiet --disable-pip-version-check --require-hashes --only-binary :all:"
"$python" -m pip install $pinned --requirement deploy/requirements-build.lock
"$python" -m pip download $pinned --dest "$dir" --requirement deploy/requirements.lock
KVSCOUT_REQUIRE_NATIVE=1 "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$dir" .
