#!/usr/bin/env bash
# Debian packages that the tests need, one line each: command that proves it is there, package that brings it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

needs='
curl           curl
redis-server   redis-server
prometheus     prometheus
'
missing=()
while read -r command package; do
  [ -z "$command" ] || command -v "$command" >/dev/null || missing+=("$package")
done <<<"$needs"
compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || missing+=(postgresql)   # Debian keeps it off the PATH
[ ${#missing[@]} -gt 0 ] || exit 0

command -v apt-get >/dev/null || die "the tests need: ${missing[*]}. Install them with your system's package manager."
sudo=()
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || die "the tests need: ${missing[*]}. Run as root: apt-get install ${missing[*]}"
  sudo=(sudo)
fi
mkdir -p .venv
echo "[test] installing ${missing[*]}"
# Debian starts a server as soon as it is installed, unless this file forbids it. The tests start their own.
heartbeat .venv/apt.log "${sudo[@]}" sh -c 'policy=/usr/sbin/policy-rc.d
  [ -e $policy ] || { trap "rm -f $policy" EXIT; printf "#!/bin/sh\nexit 101\n" >$policy; chmod 755 $policy; }
  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"' _ "${missing[@]}" ||
  { tail -n 5 .venv/apt.log >&2; die "apt-get could not install: ${missing[*]}"; }
