#!/usr/bin/env bash
# EMPO² against GRPO and its relatives on the toy world: one row per run, non-zero exit unless EMPO² beats GRPO.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: bash launch/toy_study.sh [--dry-run] [--seeds N] [--arms A,B] [--jobs N] [--check RESULTS]

  --dry-run   print the runs, which of them are finished, and stop
  others      as `empo2 study` takes them

The result lies in runs/studies/toy; a study that was interrupted continues when the command is repeated.
EOF
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
dry_run=false study=(.venv/bin/empo2 study configs/studies/toy.toml "$@")
for argument; do
  case $argument in
    --dry-run) dry_run=true ;;
    -h | --help) usage; exit 0 ;;
  esac
done

echo "+ bash launch/setup.sh cpu --extras envs"
$dry_run || bash launch/setup.sh cpu --extras envs
echo "+ ${study[*]}"
if $dry_run && [[ ! -x .venv/bin/empo2 ]]; then exit 0; fi # not installed yet: nothing can say more
exec "${study[@]}"
