#!/bin/bash
# From public text to a model that one talks to: text, tokenizer, base model, evaluation, fine-tuning on chats, chat, report.
#
#   examples/speedrun.sh [OUT]         160 million parameters, 1.9 billion tokens of FineWeb-Edu: one H200 or MI300X, about an
#                                      hour by the estimate of `llamac plan`; 7 GB of downloads; nobody has run it in full
#   examples/speedrun.sh --tiny [OUT]  2.1 million parameters on two CPU cores: about a minute, without downloads
#
# The same command continues after an interruption. `make train_llama3` comes first.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
tiny=
if [ "${1:-}" = --tiny ]; then
    tiny=1
    shift
fi
case ${1:-} in
-*) echo "$0: expected [--tiny] [OUT], found $1" >&2 && exit 2 ;;
esac
out=${1:-out/speedrun${tiny:+-tiny}}
if [ ! -x train_llama3 ]; then
    echo "$0: expected train_llama3 in $PWD, found none; run make train_llama3" >&2
    exit 2
fi
mkdir -p "$out"

if [ "$tiny" ]; then
    text=(stdlib) vocabulary=2048 depth=3 context=256
    training=(--batch-size 4 --seq-len 128 --steps 300 --lr 3e-3 --warmup-steps 20 --val-every 50 --sample-every 150)
    chats=examples/chats.jsonl
    tuning=(--epochs 40 --batch-size 4 --lr 3e-3)
    evaluation=(--shards "$out/data/val_*.bin")
else
    # Three of the 14 files of the sample of 10 billion tokens.
    hf download HuggingFaceFW/fineweb-edu --repo-type dataset --include 'sample/10BT/00[012]_*.parquet' --local-dir "$out/text"
    hf download HuggingFaceTB/everyday-conversations-llama3.1-2k --repo-type dataset --include '*train_sft*.parquet' \
        --local-dir "$out/chats"
    text=("$out/text") vocabulary=49152 depth=12 context=2048
    training=(--dtype bf16 --master-weights on --batch-size 16 --seq-len 2048 --total-batch-size 524288 --steps 3600 --lr 1e-3
        --warmup-steps 200 --val-every 300 --sample-every 900 --checkpoint-every 600)
    chats="$out/chats/**/*.parquet"
    tuning=(--dtype bf16 --epochs 2 --batch-size 16 --lr 1e-4)
    evaluation=(--tasks "hellaswag,arc_easy,piqa" --limit 1000)
fi

step() { printf '\n== %s\n' "$*"; }

step "1. Text and tokenizer"
llamac data "${text[@]}" --vocab-size $vocabulary --out "$out/data"
step "2. Model"
[ -e "$out/model" ] || llamac model --depth $depth --context $context --tokenizer "$out/data" --out "$out/model"
step "3. Training"
./train_llama3 --model "$out/model" --train-data "$out/data/train_*.bin" --val-data "$out/data/val_*.bin" \
    "${training[@]}" --resume auto --out "$out/base"
step "4. Evaluation"
llamac eval "$out/base" "${evaluation[@]}"
step "5. Fine-tuning on chats"
llamac finetune "$out/base" "$chats" --template chatml "${tuning[@]}" --resume auto --out "$out/chat"
step "6. Chat"
echo "Hello, who are you?" | llamac chat "$out/chat" --temperature 0 --tokens 60
step "7. Report"
llamac report "$out/base" "$out/chat" --to "$out/report.html"
printf '\nllamac chat %s\nllamac serve %s\n' "$out/chat" "$out/chat"
