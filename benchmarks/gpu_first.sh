#!/usr/bin/env bash
# Runs the benchmarks of the first half hour on a GPU: three calls of at most nine minutes (docs/gpu.md).
#
#   bash benchmarks/gpu_first.sh 1|2|3|all [--out FOLDER] [--wheels FOLDER] [--checkpoint FOLDER --data FILE]
#   bash benchmarks/gpu_first.sh --small             all three with sizes that a CPU can finish
#
# Each call writes call-N.json (results, complete at any moment) and call-N.txt (output) to FOLDER, by default
# runs/gpu_first. It needs no network, checkpoint or data. An interrupted call keeps what was measured, and the
# next call does not depend on it.
set -uo pipefail
cd "$(dirname "$0")/.."
calls=all
case "${1:-}" in
  1 | 2 | 3 | all) calls=$1; shift ;;
esac
[ "$calls" = all ] && calls="1 2 3"
code=0
for call in $calls; do
  "${PYTHON:-python3}" benchmarks/gpu_suite.py --call "$call" "$@" || code=$?
done
exit $code
