#!/bin/sh
# Sees to it that there is a Chromium for `make test-browser`: the system's own, by its package manager.
set -eu
for name in chromium chromium-browser google-chrome google-chrome-stable; do  # the same names as in explanations.py
    if command -v "$name" > /dev/null; then exit 0; fi
done
if ! command -v apt-get > /dev/null; then
    echo 'make test-browser needs Chromium or Chrome, and there is no apt-get to install it with: install one' >&2
    exit 2
fi
if [ "$(id -u)" = 0 ]; then as_root=; else as_root=sudo; fi
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get update -qq
$as_root apt-get install -qq --yes --no-install-recommends chromium > /dev/null
