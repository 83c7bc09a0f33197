#!/usr/bin/env bash
# Make (or bring up to date) the project's virtual environment. Nothing outside it is changed.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: bash launch/setup.sh [cpu|cuda12|cuda13|tpu] [--extras LIST] [--venv DIR] [--dry-run]

  cpu|cuda12|cuda13|tpu  accelerator that JAX is installed for (default: cpu)
  --extras LIST          extras of pyproject.toml, comma-separated (default: dev,notebooks,envs; also $EXTRAS)
  --venv DIR             environment to make or update (default: .venv at the repository root)
  --dry-run              print the commands and stop
  PYTHON=/path/python3   interpreter to use; otherwise python3 if it is 3.11 or newer, else the newest found
EOF
}

fail() { echo "setup: $*" >&2; exit 2; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/options.sh"
accelerator="" extras=${EXTRAS:-dev,notebooks,envs} venv=$root/.venv dry_run=false
while (($#)); do
  case $1 in
    cpu | cuda12 | cuda13 | tpu)
      [[ -z $accelerator ]] || fail "$accelerator $1: one accelerator is allowed"
      accelerator=$1
      ;;
    --extras) [[ -n ${2:-} ]] || fail "--extras needs a list"; extras=$2; shift ;;
    --venv) [[ -n ${2:-} ]] || fail "--venv needs a directory"; venv=$2; shift ;;
    --dry-run) dry_run=true ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; fail "unknown argument: $1" ;;
  esac
  shift
done
known=$(sed -n '/^\[project.optional-dependencies\]/,/^\[/s/^\([a-z0-9_-]*\) = .*/\1/p' "$root/pyproject.toml" | paste -sd' ' -)
IFS=', ' read -ra asked <<<"$extras"
for extra in ${asked[@]+"${asked[@]}"}; do
  [[ " $known " == *" $extra "* ]] || fail "--extras $extra: pyproject.toml has no such extra; allowed: ${known// /, }"
done
[[ ${accelerator:=cpu} == cpu ]] || extras=$extras,$accelerator

suitable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  if [[ -n ${PYTHON:-} ]]; then
    suitable "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.11 or newer with venv"
    echo "$PYTHON"
    return
  fi
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11; do
    if suitable "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer with the venv module on PATH; install one or set PYTHON=/path/to/python3"
}

# Identity of a complete installation: what is asked for and by which interpreter version.
stamp_of() { { echo "$1"; "$2" -V; cat "$root/pyproject.toml" "$root/constraints.txt"; } | cksum; }

# Extras only ever accumulate, so that the quickstart and the tests can share one environment.
stamp=$venv/empo2_installed
if [[ -f $stamp ]]; then
  extras=$(sed -n 2p "$stamp"),$extras
fi
extras=$(tr ',' '\n' <<<"$extras" | sed '/^$/d' | sort -u | paste -sd, -)

if [[ -f $stamp && -x $venv/bin/python && $(sed -n 1p "$stamp") == "$(stamp_of "$extras" "$venv/bin/python")" ]]; then
  echo "setup: $venv is up to date ($extras)"
  exit 0
fi

makeable --venv "$venv"
run() {
  echo "+ $*"
  $dry_run || "$@"
}
if [[ ! -x $venv/bin/python ]]; then
  python=$(find_python)
  run "$python" -m venv "$venv"
fi
run "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  --constraint "$root/constraints.txt" --editable "$root[$extras]"
$dry_run || printf '%s\n%s\n' "$(stamp_of "$extras" "$venv/bin/python")" "$extras" >"$stamp"
echo "setup: $venv is ready ($extras)"
