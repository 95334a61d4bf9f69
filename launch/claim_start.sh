#!/usr/bin/env bash
# Creates the folder of a new start in a job's folder, start_N with the lowest free number, and prints N.
#
#   launch/claim_start.sh RUN_DIR/jobs/JOB
set -euo pipefail

mkdir -p "$1"
number=0
# If several processes try at the same time, only one of them succeeds.
until mkdir "$1/start_$number" 2>/dev/null; do
  [[ -d $1/start_$number ]] || { echo "error: $1/start_$number cannot be created" >&2; exit 2; }
  ((++number))
done
echo "$number"
