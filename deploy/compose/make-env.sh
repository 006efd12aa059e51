#!/bin/sh
# make-env.sh: writes missing passwords required by compose.yaml to .env, which Compose reads.
# Letters and digits, beginning with a letter: passwords are used in URLs, and NATS parses digits as a number.
set -eu
cd "$(dirname "$0")/../.."
umask 077
touch .env
for name in NATS_PASSWORD GRAFANA_PASSWORD; do
    grep -q "^$name=." .env || echo "$name=k$(od -An -N 20 -tx1 /dev/urandom | tr -d ' \n')" >>.env
done
