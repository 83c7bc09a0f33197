#!/usr/bin/env bash
# The main job on this machine: install, warm-start a small real model, train it with EMPO² on ScienceWorld, report.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: bash launch/quickstart.sh [--dry-run] [--iterations N] [--section.key value ...]

  --iterations N        length of the run (short for --run.iterations N)
  --section.key value   any key of the configuration, handed on to `empo2 train`
  --dry-run             print the commands and stop

The result lies in runs/quickstart; a run that was interrupted continues when the command is repeated.
EOF
}

fail() { echo "quickstart: $*" >&2; exit 2; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/options.sh"
cd "$root"
export MALLOC_MMAP_THRESHOLD_=1048576 # weights that are freed go back to the system at once: 2 GB less at the peak
config=configs/quickstart.toml run_dir=runs/quickstart dry_run=false overrides=()
while (($#)); do
  case $1 in
    --dry-run) dry_run=true ;;
    --iterations)
      whole "$1" "${2:-}" 0 999999999
      overrides+=(--run.iterations "$2"); shift ;;
    -h | --help) usage; exit 0 ;;
    *) overrides+=("$1") ;;
  esac
  shift
done

run() {
  echo "+ $*"
  $dry_run || "$@"
}
run bash launch/setup.sh cpu --extras envs
# `exec`: SIGTERM and Ctrl-C go to the run itself, which saves and says how to go on.
run exec .venv/bin/empo2 train "$config" --run.dir "$run_dir" ${overrides[@]+"${overrides[@]}"}
