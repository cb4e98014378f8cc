# Shared by the shell scripts: sourced, never run.

die() { echo "sekisho: $*" >&2; exit 2; }

step() { echo "[$1/$2] $3"; }

sha256() { # of standard input
  if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -d' ' -f1
}

find_python() { # the first Python >= 3.11, PYTHON first
  local name
  for name in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13 python3.14; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      command -v "$name"
      return 0
    fi
  done
  return 1
}

find_compiler() {
  local name
  for name in ${CXX:+"$CXX"} c++ g++ clang++; do
    command -v "$name" && return 0
  done
  return 1
}

kill_tree() { # a process and what it started, deepest first
  local child
  for child in $(pgrep -P "$1" 2>/dev/null); do kill_tree "$child"; done
  kill "$1" 2>/dev/null || true
}

heartbeat() { # log file, then a command: runs it quietly and says every 15 seconds that it is still at it
  local log=$1 began=$SECONDS next=15 pid rc=0
  shift
  "$@" >"$log" 2>&1 </dev/null &
  pid=$!
  trap 'kill_tree "$pid"; wait "$pid" 2>/dev/null; exit 130' INT TERM
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.2
    if [ $((SECONDS - began)) -ge "$next" ]; then
      echo "      ... ${next} s"
      next=$((next + 15))
    fi
  done
  wait "$pid" || rc=$?
  trap - INT TERM
  return "$rc"
}
