#!/usr/bin/env bash
# Prints a free port of a host, chosen at random from LARGEBATCH_PORTS (default: 10000-32767, below ephemeral ports).
#
#   launch/free_port.sh HOST
set -euo pipefail

range=${LARGEBATCH_PORTS:-10000-32767}
if [[ ! $range =~ ^([1-9][0-9]*)-([1-9][0-9]*)$ ]] || ((BASH_REMATCH[1] > BASH_REMATCH[2])); then
  echo "error: LARGEBATCH_PORTS=$range: not a range of ports; write 10000-32767" >&2
  exit 2
fi
for _ in {1..20}; do
  port=$((BASH_REMATCH[1] + (RANDOM * 32768 + RANDOM) % (BASH_REMATCH[2] - BASH_REMATCH[1] + 1)))
  # A port that accepts a connection is in use. A firewall that drops packets gives no answer.
  # shellcheck disable=SC2016
  if ! timeout 5 bash -c 'exec 3<>"/dev/tcp/$1/$2"' bash "$1" "$port" 2>/dev/null; then
    echo "$port"
    exit 0
  fi
done
echo "error: all of 20 ports of $1 that were tried in LARGEBATCH_PORTS=$range are in use; write another range" >&2
exit 1
