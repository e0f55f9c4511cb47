#!/usr/bin/env bash
# The measurements behind the speed targets, in the order of their worth, on a GPU.
# usage: benchmarks/targets.sh FOLDER [NAME ...]
# Every measurement appends its JSON line to FOLDER/lines.jsonl and its log to FOLDER/NAME.log; one
# that fails is reported and the next one runs. Without names: all but `short`, a first look in about
# two minutes. `-whole` computes whole canvases to any number of requests, as the targets say it;
# without it engines compute what they do by default.
set -u
folder=${1:?usage: $0 FOLDER [NAME ...]}
shift
mkdir -p "$folder"
[ $# -gt 0 ] || set -- llada dream llada-whole dream-whole llada-d2f latency memory-llada memory-dream \
    distinct tuned-llada tuned-dream
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0} HF_HUB_OFFLINE=1

measure() {
    local name=$1
    shift
    echo "== $name: diffuplug bench $*"
    local start=$SECONDS
    if python3 -m dllm_plugin.commands.cli bench "$@" >"$folder/$name.out" 2>"$folder/$name.log"; then
        sed '$d' "$folder/$name.out"
    else
        echo "FAILED with status $?; the last lines of $folder/$name.log:"
        tail -n 12 "$folder/$name.log"
    fi
    # A red gate also ends in a line.
    tail -n 1 "$folder/$name.out" | grep '^{' >>"$folder/lines.jsonl"
    echo "== $name: $((SECONDS - start)) s"
}

# Grid points of more than 2,048 positions are left out: 64 requests are measured at canvas 32.
grid=(--requests 1,16,64 --canvas 32,128 --max-positions 2048 --context 1024)
served=(--input-len 512 --output-len 256 --tokens-per-forward 3 --rounds 3 --vs ar,hf --profile)
declare -A shapes=([llada]=llada-8b [dream]=dream-7b)
for name in "$@"; do
    of=${shapes[${name%%-*}]:-${shapes[${name##*-}]:-}}
    case $name in
    short) measure short step --shapes llada-8b --requests 1,64 --context 1024 --profile ;;
    llada | dream) measure $name all --shapes $of "${grid[@]}" "${served[@]}" ;;
    llada-whole | dream-whole)
        measure $name step --shapes $of "${grid[@]}" --commit-alone-from 0 --vs ar --profile
        ;;
    llada-d2f)
        measure $name step --shapes $of --strategy d2f --requests 1,4,16,64 --canvas 128 \
            --context 1024 --profile
        ;;
    latency) measure latency latency --vs ar,hf --rounds 8 ;;
    memory-llada | memory-dream)
        # The KV of 256 answers of LLaDA's in blocks of 64 does not fit.
        measure $name step --shapes $of --requests 256 --canvas 128 --block-length 32 --context 256 \
            --gpu-memory-utilization 0.9 --commit-alone-from 0
        ;;
    distinct)
        measure distinct step --shapes llada-8b --requests 16,64 --canvas 32 --context 1024 \
            --commit-alone-from 0 --kv-cache-layout distinct
        ;;
    tuned-llada | tuned-dream)
        measure $name step --shapes $of --requests 1 --canvas 32,128 --context 1024 --profile \
            --compilation-config '{"compile_sizes": ["cudagraph_capture_sizes"]}'
        ;;
    *) echo "unknown measurement $name" ;;
    esac
done
