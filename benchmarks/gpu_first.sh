#!/usr/bin/env bash
# Runs the benchmarks of the first half hour on a GPU: calls of at most nine minutes (docs/gpu.md).
#
#   bash benchmarks/gpu_first.sh 1|2|3|4|5|all [--out FOLDER] [--wheels FOLDER]
#   bash benchmarks/gpu_first.sh --small             all of them with sizes that a CPU can finish
#
# The first half of call 1 answers most of what is asked; calls 4 and 5 are for who has more than half an hour. Each
# call begins with what the machine lacks, and writes to FOLDER, by default runs/gpu_first: call-N.jsonl (each
# row when it is measured), call-N.json (results) and call-N.txt (output). Whatever ends a call, these have what
# was measured; the next call does not depend on it. It needs no network, checkpoint or data.
set -uo pipefail
cd "$(dirname "$0")/.."
calls=all
case "${1:-}" in
  1 | 2 | 3 | 4 | 5 | all) calls=$1; shift ;;
esac
[ "$calls" = all ] && calls="1 2 3 4 5"
code=0
for call in $calls; do
  "${PYTHON:-python3}" benchmarks/gpu_suite.py --call "$call" "$@" || code=$?
done
exit $code
