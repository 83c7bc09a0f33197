#!/usr/bin/env bash
# Train with several processes on this machine, each with virtual CPU devices: the multi-host path without hosts.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: bash launch/local.sh [--processes N] [--devices M] [--retries K] [--grace S] [--dry-run] CONFIG [--section.key value ...]

  --processes N         processes, joined by jax.distributed (default: 2; at most 256)
  --devices M           virtual CPU devices of each (default: 2; at most 256)
  --retries K           times the gang is started again when one dies (default: 3)
  --grace S             seconds from SIGTERM to SIGKILL (default: 120)
  --section.key value   any key of the configuration; model.mesh defaults to N·M,1,1
  --dry-run             print the commands and stop
  PYTHON=/path/python   interpreter (default: .venv/bin/python)
EOF
}
fail() { echo "local: $*" >&2; exit 2; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/options.sh"
processes=2 devices=2 config="" supervise=() arguments=()
while (($#)); do
  case $1 in
    --processes) whole "$1" "${2:-}" 1 256; processes=$2; shift ;;
    --devices) whole "$1" "${2:-}" 1 256; devices=$2; shift ;;
    --retries | --grace) [[ -n ${2:-} ]] || fail "$1 needs a number"; supervise+=("$1" "$2"); shift ;;
    --dry-run) supervise+=(--dry-run) ;;
    -h | --help) usage; exit 0 ;;
    --*=*) arguments+=("$1") ;;
    --*) arguments+=("$1" ${2+"$2"}); shift $(($# > 1)) ;;
    *) config=${config:-$1} arguments+=("$1") ;;
  esac
  shift
done
[[ -n $config ]] || { usage >&2; fail "CONFIG is missing"; }
[[ -f $config ]] || fail "$config: no such configuration file"
[[ " ${arguments[*]} " == *" --model.mesh "* ]] || arguments+=(--model.mesh "$((processes * devices)),1,1")
python=${PYTHON:-$root/.venv/bin/python}
exec "$python" "$root/launch/supervise.py" --processes "$processes" --devices "$devices" \
  ${supervise[@]+"${supervise[@]}"} -- "$python" -m empo2_jax train "${arguments[@]}"
