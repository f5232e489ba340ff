#!/usr/bin/env bash
# One visit to a machine with a Hopper GPU: the tests of chosen operations, then the benchmark of chosen operations.
#
#   scripts/gpu_session.sh [--tests "A B"] [--bench "A B"] [--sanitize "A B"] [--counters "CASE ..."]
#                          [--test-seconds S] [--bench-seconds S] [--op-seconds S] [--sanitize-seconds S]
#                          [--commit HASH] [--out DIR] [-- OPTIONS OF xlafuse bench kernels]
#
# Each list is in the order to run; "all" is the whole registry (the default of tests and benchmark), "none" leaves that
# part out (the default of the others). Each part has its time limit and its log under DIR, and none stops another. Of
# the tests only failures and the count are printed; of the benchmark a line a shape, at most 8,500 characters.
# DIR has gpu-tests.json, kernels.json, sanitizer.json and counters.json. --commit: where the copy has no git history.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
tests=all bench=all sanitize=none counters=none sanitize_seconds=145 test_seconds=240 bench_seconds=280 op_seconds=60 out=${OUT:-gpu-session}
while (($#)); do
  case $1 in
    --tests) tests=$2 ;;
    --bench) bench=$2 ;;
    --sanitize) sanitize=$2 ;;
    --counters) counters=$2 ;;
    --sanitize-seconds) sanitize_seconds=$2 ;;
    --commit) export XLAFUSE_COMMIT=$2 ;;
    --test-seconds) test_seconds=$2 ;;
    --bench-seconds) bench_seconds=$2 ;;
    --op-seconds) op_seconds=$2 ;;
    --out) out=$2 ;;
    --) shift; break ;;
    *) echo "gpu_session.sh: unknown option $1; see its first lines" >&2; exit 2 ;;
  esac
  shift 2
done
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
status=0

if [[ $tests != none ]]; then
  echo "== tests/gpu: $tests"
  selection=()
  [[ $tests == all ]] || selection=(-k "$(sed 's/  */ or /g' <<<"$tests")")
  # Sixteen processes share the GPU. No autotuning: trying XLA's ways to compute products that run once took two thirds
  # of the time.
  XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_autotune_level=0" XLA_PYTHON_CLIENT_PREALLOCATE=false \
    timeout --kill-after=10 "$test_seconds" \
    "$python" -m pytest tests/gpu -n 16 --dist load --maxschedchunk 1 --durations 15 -q --no-header -p no:cacheprovider -p no:benchmark --tb=short \
    --junitxml="$out/tests.xml" "${selection[@]}" \
    >"$out/tests.log" 2>&1
  code=$?
  ((code)) && status=1
  ((code == 124 || code == 137)) && echo "tests were ended after $test_seconds s"
  grep -E '^(FAILED|ERROR) ' "$out/tests.log" | sort -u | cut -c1-400 | head -15
  # Only the short error lines: the log has the rest.
  grep -E '^E  ' "$out/tests.log" | cut -c1-160 | awk '!seen[$0]++' | head -12
  tail -n 1 "$out/tests.log" | cut -c1-200
  [[ -f $out/tests.xml ]] && "$python" scripts/write_results.py --tests "$out/tests.xml" -o "$out/gpu-tests.json"
fi

if [[ $bench != none ]]; then
  echo "== benchmark: $bench"
  operations=()
  if [[ $bench != all ]]; then for name in $bench; do operations+=(--op "$name"); done; fi
  # On the limit the interrupt lets it stop its process; what was measured is in the file by then.
  timeout --signal=INT --kill-after=10 "$bench_seconds" \
    "$python" -m xlafuse.cli bench kernels "${operations[@]}" --seconds "$op_seconds" -o "$out/kernels.json" "$@" \
    >"$out/bench.log" 2>"$out/bench-errors.log"
  code=$?
  ((code)) && status=1
  ((code == 124 || code == 137)) && echo "the benchmark was ended after $bench_seconds s"
  [[ -f $out/kernels.json ]] && "$python" scripts/write_results.py --show "$out/kernels.json" --characters 8500
  ((code)) && grep -vE '^\s*$' "$out/bench-errors.log" | cut -c1-300 | tail -n 6
fi

if [[ $sanitize != none ]]; then
  echo "== compute-sanitizer: $sanitize"
  operations=()
  [[ $sanitize == all ]] || read -ra operations <<<"$sanitize"
  timeout --kill-after=10 "$sanitize_seconds" \
    "$python" scripts/sanitize.py -o "$out/sanitizer.json" --jobs 8 --seconds "$((sanitize_seconds - 10))" \
    "${operations[@]}" 2>&1 | tail -c 4000
  ((PIPESTATUS[0])) && status=1
fi

if [[ $counters != none ]]; then
  echo "== counters"
  read -ra cases <<<"$counters"
  # Nsight Compute slows a call by seconds: the limit is for some thirty cases.
  ((${#cases[@]})) && XLA_PYTHON_CLIENT_PREALLOCATE=false timeout --kill-after=10 "$((30 + 4 * ${#cases[@]}))" \
    "$python" scripts/read_counters.py -o "$out/counters.json" "${cases[@]}" >"$out/counters.log" 2>&1
  ((${#cases[@]} && $?)) && { status=1; tail -n 5 "$out/counters.log" | cut -c1-300; }
  grep -c µs "$out/counters.log" 2>/dev/null | sed 's/$/ launches/'
fi
exit $status
