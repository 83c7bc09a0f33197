#!/usr/bin/env bash
# Train on a Cloud TPU VM slice: the same command on every host, joined by what the hosts know of each other.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: bash launch/tpu_vm.sh --name TPU --zone ZONE [--folder DIR] [--install] [--dry-run]
                             CONFIG [--section.key value ...]

  --name TPU      of the TPU VM (gcloud compute tpus tpu-vm list)
  --zone ZONE     where it is
  --folder DIR    this repository on the hosts (default: empo2_jax)
  --install       first run launch/setup.sh tpu on every host
  --dry-run       print the commands and stop

run.dir must lie on storage that all hosts mount. SIGTERM to one process on any host saves once and stops all.
EOF
}
fail() { echo "tpu_vm: $*" >&2; exit 2; }

name="" zone="" folder=empo2_jax install=false dry_run=false arguments=()
while (($#)); do
  case $1 in
    --name) [[ -n ${2:-} ]] || fail "--name needs a name"; name=$2; shift ;;
    --zone) [[ -n ${2:-} ]] || fail "--zone needs a zone"; zone=$2; shift ;;
    --folder) [[ -n ${2:-} ]] || fail "--folder needs a folder"; folder=$2; shift ;;
    --install) install=true ;;
    --dry-run) dry_run=true ;;
    -h | --help) usage; exit 0 ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
[[ -n $name && -n $zone ]] || fail "--name and --zone are needed (see --help)"
((${#arguments[@]})) || fail "CONFIG is missing"

everywhere() {
  local command=(gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "$1")
  printf '+'; printf ' %q' "${command[@]}"; echo
  $dry_run || "${command[@]}"
}
$dry_run || command -v gcloud >/dev/null || fail "gcloud is not on PATH"
if $install; then everywhere "cd $(printf %q "$folder") && bash launch/setup.sh tpu"; fi
everywhere "cd $(printf %q "$folder") && $(printf '%q ' .venv/bin/empo2 train "${arguments[@]}" --coordinator auto)"
