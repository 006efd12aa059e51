#!/bin/sh
# Builds kube-apiserver, etcd and the InferencePool CRD for `make e2e-kubernetes`, from the Go module proxy: ten minutes
# of one core, once. 132 MB.
#
#   sh tests/build_kubernetes.sh DIR
set -eu
dir=${1:?where to build}
kubernetes=1.36.3
libraries=0.36.3 # of Kubernetes' own, of the same release
etcd=3.6.16      # Debian's 3.4 makes lists fail after a restart
pools=1.1.0
mkdir -p "$dir/bin" "$dir/build/apiserver" "$dir/build/etcd" "$dir/build/pools"

if [ ! -x "$dir/bin/kube-apiserver" ]; then
  cd "$dir/build/apiserver"
  mod=$(go mod download -json "k8s.io/kubernetes@v$kubernetes" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
  # Kubernetes names its libraries by folders beside it; as modules they have versions of their own.
  {
    printf 'module local/apiserver\n\ngo 1.26.0\n\ngodebug default=go1.26\n\nrequire k8s.io/kubernetes v%s\n\nreplace (\n' "$kubernetes"
    sed -n 's|^\t\(k8s\.io/[^ ]*\) => \./staging/.*|\t\1 => \1 v'"$libraries"'|p' "$mod"
    echo ')'
  } >go.mod
  printf '//go:build tools\n\npackage tools\n\nimport _ "k8s.io/kubernetes/cmd/kube-apiserver"\n' >tools.go
  nice go mod tidy
  version=k8s.io/component-base/version
  CGO_ENABLED=0 nice -n 19 go build -p "${CORES:-1}" -trimpath -o "$dir/bin/kube-apiserver" \
    -ldflags "-s -w -X $version.gitVersion=v$kubernetes -X $version.gitMajor=1 -X $version.gitMinor=36 -X $version.gitTreeState=clean" \
    k8s.io/kubernetes/cmd/kube-apiserver
fi
if [ ! -x "$dir/bin/etcd" ]; then
  cd "$dir/build/etcd"
  printf 'module local/etcd\n\ngo 1.26.0\n\nrequire go.etcd.io/etcd/server/v3 v%s\n' "$etcd" >go.mod
  printf '//go:build tools\n\npackage tools\n\nimport _ "go.etcd.io/etcd/server/v3"\n' >tools.go
  nice go mod tidy
  CGO_ENABLED=0 nice -n 19 go build -p "${CORES:-1}" -trimpath -ldflags '-s -w' -o "$dir/bin/etcd" go.etcd.io/etcd/server/v3
fi
if [ ! -f "$dir/inferencepools.yaml" ]; then
  cd "$dir/build/pools"
  module=$(go mod download -json "sigs.k8s.io/gateway-api-inference-extension@v$pools" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
  cp "$module/config/crd/bases/inference.networking.k8s.io_inferencepools.yaml" "$dir/inferencepools.yaml"
  chmod u+w "$dir/inferencepools.yaml"
fi
echo "$dir/bin: kube-apiserver $kubernetes, etcd $etcd; InferencePool of gateway-api-inference-extension $pools"
