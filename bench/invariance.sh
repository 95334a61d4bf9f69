#!/usr/bin/env bash
# The promise on trial: 50 steps on 1 to 4 processes, micro-batches of 2, 4 and 8, and five strategies, each against one
# process, with documents of unequal length, ragged batches, clipping, and a batch that grows. Half an hour on two
# cores. Writes a table and a JSON for each scenario.
#
#     bench/invariance.sh bench/results/invariance
set -uo pipefail

results=${1:?a folder for the results}
mkdir -p "$results"
recipe=recipes/causal_lm/gpt_pydoc.json
small=(--model.num_layers=1 --model.hidden_size=32 --model.num_heads=2 --data.block_size=32)
combinations=(--world-sizes 1,2,3,4 --micro-batch-sizes 2,4,8 --steps 50)
sgd=(--learning_rate.base_lr=0.1 '--train.duration={"steps": 60}'
  '--optimizer={"name": "sgd", "weight_decay": 0.01, "momentum": 0.9, "nesterov": true, "clip_norm": 1.0}')
documents=(--data.samples=documents --data.num_eval_samples=40)
# 500 documents make ten batches of 48 and one of 20.
ragged=("${documents[@]}" --data.num_train_samples=500 --batch.global_batch_size=48 --batch.last=keep)
growing='--batch.global_batch_size=[{"from": {"steps": 0}, "size": 48}, {"from": {"samples": 1000}, "size": 96},
  {"from": {"steps": 40}, "size": 144}]'

failed=0
run() {
  local name=$1
  shift
  largebatch verify "$recipe" "${small[@]}" "${combinations[@]}" --output "$results/$name.json" "$@" |
    tee "$results/$name.txt" || failed=1
}

run documents_sgd_fp32 "${sgd[@]}" "${documents[@]}" --data.num_train_samples=2000 --batch.global_batch_size=48
run ragged_sgd_fp32 "${sgd[@]}" "${ragged[@]}"
run growing_sgd_fp32 "${sgd[@]}" "$growing"
run ragged_sgd_fp64 "${sgd[@]}" "${ragged[@]}" --precision=fp64
run blocks_adamw_fp32 --batch.global_batch_size=48
exit $failed
