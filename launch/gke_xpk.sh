#!/usr/bin/env bash
# Train on TPU slices of a GKE cluster with xpk (https://github.com/AI-Hypercomputer/xpk).
set -euo pipefail

usage() {
  cat <<'EOF'
usage: bash launch/gke_xpk.sh --cluster NAME --image IMAGE --tpu-type TYPE [--slices N] [--workload NAME]
                              [--restarts K] [--dry-run] CONFIG [--section.key value ...]

  --cluster NAME    of the GKE cluster that xpk knows
  --image IMAGE     built from launch/Dockerfile with ACCELERATOR=tpu
  --tpu-type TYPE   for example v5litepod-16
  --slices N        slices of that type (default: 1; several need a network between them)
  --workload NAME   (default: empo2)
  --restarts K      of the whole gang (default: 10)
  --dry-run         print the command and stop

run.dir must lie on storage that all hosts mount.
EOF
}
fail() { echo "gke_xpk: $*" >&2; exit 2; }
source "$(dirname "${BASH_SOURCE[0]}")/options.sh"

cluster="" image="" tpu="" slices=1 workload=empo2 restarts=10 dry_run=false arguments=()
while (($#)); do
  case $1 in
    --cluster) [[ -n ${2:-} ]] || fail "--cluster needs a name"; cluster=$2; shift ;;
    --image) [[ -n ${2:-} ]] || fail "--image needs a name"; image=$2; shift ;;
    --tpu-type) [[ -n ${2:-} ]] || fail "--tpu-type needs a type"; tpu=$2; shift ;;
    --slices) whole "$1" "${2:-}" 1 10000; slices=$2; shift ;;
    --workload) [[ -n ${2:-} ]] || fail "--workload needs a name"; workload=$2; shift ;;
    --restarts) whole "$1" "${2:-}" 0 1000000; restarts=$2; shift ;;
    --dry-run) dry_run=true ;;
    -h | --help) usage; exit 0 ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
[[ -n $cluster && -n $image && -n $tpu ]] || fail "--cluster, --image and --tpu-type are needed (see --help)"
((${#arguments[@]})) || fail "CONFIG is missing"

train=$(printf '%q ' empo2 train "${arguments[@]}")
command=(xpk workload create --cluster "$cluster" --workload "$workload" --docker-image "$image"
  --tpu-type "$tpu" --num-slices "$slices" --max-restarts "$restarts" --command "${train% }")
printf '+'; printf ' %q' "${command[@]}"; echo
$dry_run && exit 0
command -v xpk >/dev/null || fail "xpk is not on PATH (pip install xpk)"
exec "${command[@]}"
