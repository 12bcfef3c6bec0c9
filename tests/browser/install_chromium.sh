#!/bin/sh
# Installs Chromium for `make test-browser` with the package manager of the system, unless it is installed.
set -eu
for name in chromium chromium-browser google-chrome google-chrome-stable; do  # the same names as in explanations.py
    if command -v "$name" > /dev/null; then exit 0; fi
done
if ! command -v apt-get > /dev/null; then
    echo 'make test-browser needs Chromium or Chrome, and apt-get is missing. Install one of them yourself.' >&2
    exit 2
fi
if [ "$(id -u)" = 0 ]; then as_root=; else as_root=sudo; fi
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get update -qq
$as_root apt-get install -qq --yes --no-install-recommends chromium > /dev/null
