#!/usr/bin/env bash
# EMPO² against GRPO and its relatives on the toy world: one row per run, non-zero exit unless EMPO² beats GRPO.
#   bash launch/toy_study.sh [--seeds N] [--arms a,b] [--check RESULTS] [--dry-run]
set -euo pipefail
cd "$(dirname "$0")/.."
[[ " $* " == *" --dry-run "* ]] && { cat configs/studies/toy.toml; exit 0; }
bash launch/setup.sh cpu --extras envs
exec .venv/bin/empo2 study configs/studies/toy.toml "$@"
