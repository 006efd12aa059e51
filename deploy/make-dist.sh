#!/bin/sh
# make-dist.sh: fills dist/ with what is published: a source distribution, and a wheel that is built from it, named after
# the oldest glibc it runs on (auditwheel), with a CycloneDX list of the crates in its extension (PEP 770).
set -eu
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
python -m pip install --quiet --editable '.[release]'
cargo cyclonedx --version >/dev/null 2>&1 || {
    echo "installing cargo-cyclonedx into .venv; compiling it takes minutes"
    cargo install --quiet --locked --root .venv cargo-cyclonedx
}

built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
KVSCOUT_REQUIRE_NATIVE=1 python -m build --no-isolation --outdir "$built" .
python -m auditwheel repair --wheel-dir "$built/repaired" "$built"/*.whl

# --target: what is linked here, without the crates of other systems.
target=$(rustc -vV | sed -n 's/^host: //p')
cargo cyclonedx --quiet --manifest-path native/Cargo.toml --target "$target" --no-build-deps --format json \
    --spec-version 1.5 --override-filename kvscout_native.cyclonedx
sed -i "s|path+file://$PWD/|path+file:///|g" native/kvscout_native.cyclonedx.json
python -m wheel unpack --dest "$built/unpacked" "$built"/repaired/*.whl
about=$(echo "$built"/unpacked/*/kvscout-*.dist-info)
mkdir "$about/sboms"
mv native/kvscout_native.cyclonedx.json "$about/sboms/"
mkdir -p dist
rm -f dist/kvscout-*
python -m wheel pack --dest-dir dist "$built"/unpacked/*
mv "$built"/*.tar.gz dist/
ls -l dist
