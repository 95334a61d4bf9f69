#!/usr/bin/env bash
# The promise on trial: 50 steps on 1 to 4 processes, micro-batches of 2, 4 and 8, and five strategies, each against one
# process: documents of unequal length, ragged batches, a batch that grows, and clipping, all at once. A quarter of an
# hour on two cores. Writes a table for each precision and optimizer.
#
#     bench/invariance.sh bench/results/invariance
set -uo pipefail

results=${1:?a folder for the results}
mkdir -p "$results"
recipe=recipes/causal_lm/gpt_pydoc.json
small=(--model.num_layers=1 --model.hidden_size=32 --model.num_heads=2 --data.block_size=32)
combinations=(--world-sizes 1,2,3,4 --micro-batch-sizes 2,4,8 --steps 50)
sgd=(--learning_rate.base_lr=0.05 '--train.duration={"steps": 60}'
  '--optimizer={"name": "sgd", "weight_decay": 0.01, "momentum": 0.9, "nesterov": true, "clip_norm": 1.0}')
# 500 documents leave a ragged batch at the end of every epoch, each of another size.
everything=(--data.samples=documents --data.num_train_samples=500 --data.num_eval_samples=40 --batch.drop_last=false
  '--batch.global_batch_size=[{"from": {"steps": 0}, "size": 48}, {"from": {"samples": 700}, "size": 96},
  {"from": {"steps": 40}, "size": 144}]')

failed=0
run() {
  local name=$1
  shift
  largebatch verify "$recipe" "${small[@]}" "${combinations[@]}" "$@" |
    tee "$results/$name.txt" || failed=1
}

run sgd_fp32 "${sgd[@]}" "${everything[@]}"
run sgd_fp64 "${sgd[@]}" "${everything[@]}" --precision=fp64
run adamw_fp32 "${everything[@]}" '--train.duration={"steps": 60}'
exit $failed
