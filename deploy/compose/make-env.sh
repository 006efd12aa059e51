#!/bin/sh
# make-env.sh: writes the passwords that compose.yaml wants into .env, which Compose reads; those that are there stay.
# Letters and digits, beginning with a letter: they stand in URLs, and NATS reads what looks like a number as one.
set -eu
cd "$(dirname "$0")/../.."
umask 077
touch .env
for name in NATS_PASSWORD GRAFANA_PASSWORD; do
    grep -q "^$name=." .env || echo "$name=k$(od -An -N 20 -tx1 /dev/urandom | tr -d ' \n')" >>.env
done
