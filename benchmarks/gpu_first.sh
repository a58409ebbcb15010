#!/usr/bin/env bash
# The first half hour on a GPU: three calls of at most nine minutes (docs/gpu.md).
#
#   bash benchmarks/gpu_first.sh 1|2|3|all [--out FOLDER] [--wheels FOLDER] [--checkpoint FOLDER --data FILE]
#   bash benchmarks/gpu_first.sh --small             all three on sizes that a CPU finishes
#
# Each leaves call-N.json (results, whole at any moment) and call-N.txt (output) in FOLDER, runs/gpu_first if
# none is given. No network, no checkpoint and no data is needed. A call that is cut off loses what it had not
# come to; the next one does not need it.
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
