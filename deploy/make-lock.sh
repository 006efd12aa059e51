#!/bin/sh
# make-lock.sh BIN LOCK: writes deploy/LOCK.lock anew, with the uv and the python in BIN: `requirements` are the packages that
# an image installs, `requirements-build` those that build kvscout itself. A version that still fits stays: --upgrade in UPGRADE.
set -eu
bin=$1 lock=$2
case $lock in
    requirements) set -- --extra otel --extra picker --extra text pyproject.toml ;;
    requirements-build) set -- - ;;
esac
"$bin/python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' |
    "$bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --only-binary :all: \
        --custom-compile-command "make lock" ${UPGRADE-} --output-file "deploy/$lock.lock" "$@" >/dev/null
echo "deploy/$lock.lock: $(grep -c == "deploy/$lock.lock") packages"
