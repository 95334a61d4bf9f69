#!/usr/bin/env bash
# Makes the folder of a new start, start_N with the first free number, in a job's folder, and prints N.
#
#   launch/claim_start.sh RUN_DIR/jobs/JOB
set -euo pipefail

mkdir -p "$1"
number=0
# Only one of several that try at the same time makes it.
until mkdir "$1/start_$number" 2>/dev/null; do
  [[ -d $1/start_$number ]] || { echo "error: $1/start_$number cannot be created" >&2; exit 2; }
  ((++number))
done
echo "$number"
