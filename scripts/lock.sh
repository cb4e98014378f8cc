#!/usr/bin/env bash
# Writes both lock files from pyproject.toml: hashes, every platform, and no address of any index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

uv=.venv/bin/uv
[ -x "$uv" ] || .venv/bin/python -m pip install --quiet --disable-pip-version-check \
  "$(.venv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["lock"])')"

compile() { # output, then further arguments
  "$uv" pip compile --quiet --no-config --generate-hashes --no-emit-index-url --no-emit-find-links --universal --python-version 3.11 \
    --custom-compile-command "make lock" --output-file "$1" "${@:2}" pyproject.toml --group build
}

compile requirements-dev.lock --extra llamacpp --extra redis --extra postgres --extra otel --extra masking --extra dev
compile requirements.lock --constraint requirements-dev.lock --extra llamacpp --extra redis --extra postgres --extra otel --extra masking
# The constraint is how the two agree; it is no reason that a reader needs.
for lock in requirements.lock requirements-dev.lock; do
  grep -v '^ *# *-c requirements-dev.lock$' "$lock" > "$lock.tmp"
  mv "$lock.tmp" "$lock"
  ! grep -nE '://|^--|@ ' "$lock" || die "$lock holds an address or an option; see the lines above"
done
echo "locked $(grep -c '==' requirements.lock) packages for running, $(grep -c '==' requirements-dev.lock) with the tools"
