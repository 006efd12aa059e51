#!/bin/sh
# check-fresh-clone.sh [CASE...]: README's two commands on a machine with nothing but python3, make and git, in clones of what
# is committed. A CASE is cargo-root, cargo-user, plain-root or plain-user (all of them if none is given): with a Rust
# toolchain on the PATH or without one; as root, which may install Debian packages, or as a user, who may not.
#   DEMO   flags of the demo; TESTS   what pytest runs. Both are short here; DEMO= TESTS= runs everything.
# It takes root to be another user; one who is not root checks the cases of a user, as themselves.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
DEMO=${DEMO---mockers 2 --rate 2 --duration 2 --think-seconds 0.2}
TESTS=${TESTS-tests/common/test_hashing.py tests/deploy/test_distributions.py}
unset MAKEFLAGS MAKELEVEL MFLAGS
place=$(mktemp -d)
chmod 755 "$place"
trap 'rm -rf "$place"' EXIT

# The toolchain itself: cargo on the PATH may be a link that reads the home of another user. Linked here, where all may read it.
toolchain() {
    [ -d "$place/rust" ] || cp -al "$(rustc --print sysroot)" "$place/rust" 2>/dev/null ||
        { rm -rf "$place/rust" && cp -a "$(rustc --print sysroot)" "$place/rust"; }
}

# Runs a command in the clone as the user of the case, with an environment that holds a PATH and little else.
inside() {
    set -- env -i PATH="$path" HOME="$home" TERM=dumb LANG=C.UTF-8 ${PIP_CERT:+PIP_CERT="$PIP_CERT"} \
        ${SSL_CERT_FILE:+SSL_CERT_FILE="$SSL_CERT_FILE"} DEMO="$DEMO" TESTS="$TESTS" "$@"
    if [ "$who" = user ] && [ "$(id -u)" -eq 0 ]; then
        set -- setpriv --reuid 65534 --regid 65534 --clear-groups "$@"
    fi
    (cd "$clone" && "$@")
}

fail() { echo "$case: $*" >&2; exit 1; }

check() {
    home=$place/$case
    clone=$home/kvscout
    log=$home/log
    mkdir "$home"
    git clone --quiet "$root" "$clone"
    path=/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin
    if [ "$rust" = cargo ]; then
        toolchain
        path=$place/rust/bin:$path
    elif PATH=$path command -v cargo >/dev/null; then
        fail "cargo is in $path: what is without it cannot be checked here"
    fi
    [ "$who" = root ] || [ "$(id -u)" -ne 0 ] || chown -R 65534:65534 "$home"

    echo "== $case: make demo"
    inside make demo
    for left_out in pytest mkdocs; do
        [ ! -e "$clone/.venv/bin/$left_out" ] || fail "make demo installed $left_out"
    done
    backend=$(inside .venv/bin/python -c 'from kvscout_common.hashing import backend_name; print(backend_name())')
    case $rust-$backend in
        cargo-native | plain-reference) ;;
        *) fail "the hashing backend is $backend" ;;
    esac
    echo "== $case: make test"
    inside make test

    echo "== $case: what is installed stays, and is renewed when what says so changes"
    inside make --dry-run setup >"$log"
    ! grep -q progress.py "$log" || fail "a second make would install again"
    [ "$rust" = plain ] || {
        touch "$clone/native/src/lib.rs"
        inside make --dry-run demo >"$log"
        grep -q build_rust "$log" || fail "a change of the Rust sources does not renew the extension"
        ! grep -q "'.\[embedded\]'" "$log" || fail "a change of the Rust sources installs the packages anew"
    }
    touch "$clone/pyproject.toml"
    inside make --dry-run demo >"$log"
    grep -q "'.\[embedded\]'" "$log" || fail "a change of pyproject.toml does not renew what a demo needs"
    inside make --dry-run test TESTS=tests/common >"$log"
    grep -q "'.\[dev,docs,embedded,otel\]'" "$log" || fail "a change of pyproject.toml does not renew what tests need"
    [ -n "${KEEP-}" ] || rm -rf "$home"
}

[ $# -gt 0 ] || {
    set -- cargo-user plain-user
    [ "$(id -u)" -ne 0 ] || set -- "$@" cargo-root plain-root
}
for case in "$@"; do
    rust=${case%-*} who=${case#*-}
    check
    echo "== $case: in order"
done
