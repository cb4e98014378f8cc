#!/usr/bin/env bash
# Makes .venv and installs what the lock file says:  scripts/setup.sh run | dev
# A stamp keyed on lock, pyproject.toml, folder and Python makes the second call cost milliseconds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

mode=${1:-run}
case $mode in
  run) lock=requirements.lock ;;
  dev) lock=requirements-dev.lock ;;
  *) die "scripts/setup.sh: '$mode' is neither run nor dev" ;;
esac
log=.venv/setup.log

stamp_for() { # lock file -> the text that a current stamp holds
  printf '%s %s %s\n' "$(cat "$1" pyproject.toml | sha256)" "$(.venv/bin/python -c 'import sys; print(sys.version.split()[0])')" "$PWD"
}

current() {
  [ -x .venv/bin/python ] && [ -f ".venv/.stamp-$mode" ] && [ "$(cat ".venv/.stamp-$mode")" = "$(stamp_for "$lock")" ]
}

usable_venv() { # right Python, pip inside, and made in this folder (a copied .venv points at the old one)
  [ -x .venv/bin/python ] && [ "$(sed -n 's/^command = .* -m venv //p' .venv/pyvenv.cfg)" -ef .venv ] &&
    .venv/bin/python -c "import sys, pip; sys.exit(sys.version_info < (3, 11))" 2>/dev/null
}

make_venv() {
  local python
  python=$(find_python) || die "Sekisho needs Python 3.11 or newer and found none as python3, python3.11, 3.12 or 3.13. Install it (Debian, Ubuntu: apt-get install python3 python3-venv) or say PYTHON=/path/to/python3."
  "$python" -c 'import ensurepip, venv' 2>/dev/null || die "$python has no venv module. Install it (Debian, Ubuntu: apt-get install python3-venv)."
  step 1 4 "creating .venv with Python $("$python" -c 'import sys; print(sys.version.split()[0])')"
  rm -rf .venv
  "$python" -m venv .venv
}

install() { # what the log calls it, then pip's arguments
  if ! heartbeat "$log" .venv/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off "${@:2}"; then
    echo "sekisho: $1 failed. The last lines of $log:" >&2
    grep -vi '^warning' "$log" | tail -n 20 >&2
    exit 1
  fi
}

without_llama() { # the lock less the one package that is compiled, so that its minutes get a line of their own
  awk '/^[^ #]/ { skip = /^llama-cpp-python==/ } !skip' "$1"
}

have_llama() {
  .venv/bin/python - "$lock" 2>/dev/null <<'PY'
import importlib.metadata, re, sys
want = re.search(r"^llama-cpp-python==(\S+)", open(sys.argv[1], encoding="utf-8").read(), re.M)
sys.exit(want is not None and importlib.metadata.version("llama-cpp-python") != want[1])
PY
}

current && exit 0
usable_venv || make_venv
rm -f .venv/.stamp-run .venv/.stamp-dev
if ! have_llama && ! find_compiler >/dev/null; then
  die "a C++ compiler is needed to build llama.cpp and none was found as c++, g++ or clang++. Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install) or name it in CXX."
fi
started=$SECONDS
step 2 4 "installing packages from $lock"
without_llama "$lock" > .venv/lock-part.txt
install "installing packages" --require-hashes -r .venv/lock-part.txt
if have_llama; then
  step 3 4 "llama.cpp is already built for this machine"
else
  step 3 4 "building llama.cpp for this machine (about 5 minutes, once)"
fi
install "building llama.cpp" --require-hashes -r "$lock"
step 4 4 "installing sekisho itself"
install "installing sekisho" --no-deps --no-build-isolation --no-index -e .
stamp_for "$lock" > ".venv/.stamp-$mode"
[ "$mode" = run ] || stamp_for requirements.lock > .venv/.stamp-run      # the dev lock holds everything of the other, same versions
echo "      ready after $((SECONDS - started)) s"
