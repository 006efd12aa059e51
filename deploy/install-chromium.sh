#!/bin/sh
# install-chromium.sh: the browser in which the dashboard is tested, from the distribution, where we may install it.
# Its tests skip where there is none, and say so.
set -eu
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    python3 "$(dirname "$0")/progress.py" "installing the Debian package chromium, for the tests of the dashboard" sh -ec \
        'apt-get update && apt-get install --yes --no-install-recommends chromium fonts-dejavu-core' && exit 0
fi
echo "There is no Chromium: the tests of the dashboard's page will be skipped. On Debian: apt-get install chromium"
