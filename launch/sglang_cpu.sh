#!/usr/bin/env bash
# A real SGLang server for a machine without a GPU, in an environment of its own; for tests, never for speed.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: bash launch/sglang_cpu.sh [--venv DIR] [--torch-index URL] [--dry-run]

  --venv DIR           environment to make (default: .sglang at the repository root; 3.4 GB)
  --torch-index URL    package index that has CPU builds of torch (default: as pip is configured)
  --dry-run            print the commands and stop
  PYTHON=/path/python  interpreter to use (default: python3.11; 3.11 is what was tried)

Then `bash launch/sglang_servers.sh --cpu --count 2 MODEL_FOLDER` starts servers. On a machine with a GPU install
`sglang` in an environment of its own instead.
EOF
}

fail() { echo "sglang_cpu: $*" >&2; exit 2; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/options.sh"
venv=$root/.sglang torch_index=() dry_run=false
while (($#)); do
  case $1 in
    --venv) [[ -n ${2:-} ]] || fail "--venv needs a directory"; venv=$2; shift ;;
    --torch-index) [[ -n ${2:-} ]] || fail "--torch-index needs a URL"; torch_index=(--extra-index-url "$2"); shift ;;
    --dry-run) dry_run=true ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; fail "unknown argument: $1" ;;
  esac
  shift
done

lists=$root/launch/sglang_cpu
stamp=$venv/empo2_installed
wanted=$(cat "$lists"/requirements*.txt | cksum)
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
  echo "sglang_cpu: $venv is up to date"
  exit 0
fi

makeable --venv "$venv"
run() {
  echo "+ $*"
  $dry_run || "$@"
}
python=${PYTHON:-python3.11}
"$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1 ||
  fail "$python is not a working Python 3.11 with venv; set PYTHON=/path/to/python3.11"
[[ -x $venv/bin/python ]] || run "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
run "${pip[@]}" ${torch_index[@]+"${torch_index[@]}"} --requirement "$lists/requirements.txt"
run "${pip[@]}" --no-deps --requirement "$lists/requirements_alone.txt"
$dry_run || echo "$wanted" >"$stamp"
echo "sglang_cpu: $venv is ready"
