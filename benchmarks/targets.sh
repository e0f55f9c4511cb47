#!/usr/bin/env bash
# The measurements behind the speed targets, in the order of their worth, on a GPU.
# usage: benchmarks/targets.sh FOLDER [llada | dream | latency | memory | short ...]
# Every measurement appends its JSON line to FOLDER/lines.jsonl and its log to FOLDER/NAME.log; one
# that fails is reported and the next one runs. Without names: llada dream latency memory.
# `short` is a first look in about two minutes.
set -u
folder=${1:?usage: $0 FOLDER [NAME ...]}
shift
mkdir -p "$folder"
[ $# -gt 0 ] || set -- llada dream latency memory
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0} HF_HUB_OFFLINE=1

measure() {
    local name=$1
    shift
    echo "== $name: diffuplug bench $*"
    local start=$SECONDS
    if python3 -m dllm_plugin.cli bench "$@" >"$folder/$name.out" 2>"$folder/$name.log"; then
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
whole=(--input-len 512 --output-len 256 --tokens-per-forward 3 --rounds 3 --vs ar,hf --profile)
for name in "$@"; do
    case $name in
    short) measure short step --shapes llada-8b --requests 1,64 --context 1024 --profile ;;
    llada) measure llada all --shapes llada-8b "${grid[@]}" "${whole[@]}" ;;
    dream) measure dream all --shapes dream-7b "${grid[@]}" "${whole[@]}" ;;
    latency) measure latency latency --vs ar,hf --rounds 8 ;;
    memory) measure memory step --shapes dream-7b --requests 256 --canvas 128 --context 256 \
        --gpu-memory-utilization 0.9 ;;
    *) echo "unknown measurement $name" ;;
    esac
done
