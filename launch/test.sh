#!/usr/bin/env bash
# Every check of the project, in the order of what fails fastest: format, lint, types, layers, audit, tests.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: bash launch/test.sh [--fast|--all] [--dry-run] [-k NAME, -x, a file, … of pytest] [-- any argument of pytest]

  (default)   everything not marked slow (at most 20 minutes on 2 cores)
  --fast      also leaves out what is marked medium (at most 4 minutes)
  --all       everything; installs the extra `services` too, for S3, W&B and MLflow
  --dry-run   print the commands and stop
  WORKERS=N   test processes (default: 2)

Words and options with one dash go on to pytest; those with two dashes stand after `--`, for example -- --durations 30.
EOF
}
fail() { echo "test: $*" >&2; exit 2; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
marks="not slow" dry_run=false arguments=()
while (($#)); do
  case $1 in
    --fast) marks="not slow and not medium" ;;
    --all) marks="" ;;
    --dry-run) dry_run=true ;;
    -h | --help) usage; exit 0 ;;
    --) shift; arguments+=("$@"); break ;;
    --*) usage >&2; fail "unknown option: $1; those of pytest stand after --" ;;
    *) arguments+=("$1") ;;
  esac
  shift
done

run() {
  echo "+ $*"
  $dry_run || "$@"
}
run bash launch/setup.sh cpu
[[ -n $marks ]] || run bash launch/setup.sh cpu --extras services  # extras accumulate
run .venv/bin/ruff format --check .
run .venv/bin/ruff check .
run .venv/bin/ty check
run .venv/bin/lint-imports
audit=0
run .venv/bin/python launch/audit.py || audit=$?
((audit == 0 || audit == 3)) || exit "$audit"

# pytest exits with 5 when it collects nothing, which `set -e` turns into a failure.
run .venv/bin/python -m pytest -m "$marks" -n "${WORKERS:-2}" --dist loadfile --durations 10 ${arguments[@]+"${arguments[@]}"}
((audit == 0)) || echo "test: the audit of the dependencies was skipped, see above" >&2
