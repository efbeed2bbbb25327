#!/usr/bin/env bash
# Puts Debian's Prometheus and promtool into .cache/prometheus, unless they are installed.
# Nothing is installed and no service is started: the package is only unpacked.
set -euo pipefail
cd "$(dirname "$0")/.."
if command -v prometheus && command -v promtool; then
    exit 0
fi >/dev/null
folder=.cache/prometheus
[ -x "$folder/usr/bin/prometheus" ] && exit 0
for tool in apt-get dpkg; do
    command -v "$tool" >/dev/null || { echo "no $tool here; install Prometheus by hand" >&2; exit 1; }
done
mkdir -p "$folder"
cd "$folder"
apt-get -qq download prometheus 2>/dev/null || {
    apt-get -qq update
    apt-get -qq download prometheus
}
dpkg -x prometheus_*.deb .
rm prometheus_*.deb
