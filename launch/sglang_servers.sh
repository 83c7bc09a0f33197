#!/usr/bin/env bash
# Start N SGLang servers on this machine, wait until all are ready, write their URLs, one a line; end them on exit.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: bash launch/sglang_servers.sh MODEL_FOLDER [options] [-- any argument of SGLang]

  --count N      servers (default: 1)
  --tp N         GPUs of each (default: 1); server i takes the GPUs from i·N on
  --cpu          on the CPU, with the environment of launch/sglang_cpu.sh
  --venv DIR     environment that has sglang (default: .sglang at the repository root)
  --urls FILE    where the URLs go, complete or not at all (default: sglang_servers.txt); for rollout.servers
  --logs DIR     output of the servers (default: sglang_logs)
  --host HOST    address to listen on (default: 127.0.0.1; another one needs EMPO2_API_KEY)
  --wait S       seconds until all must be ready (default: 900)
  --dry-run      print the commands and stop

EMPO2_API_KEY and EMPO2_ADMIN_KEY, where set, become the servers' keys. A server that ends is started again
(five times); Ctrl-C ends all.
EOF
}

fail() { echo "sglang_servers: $*" >&2; exit 2; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/options.sh"
model='' count=1 tp=1 cpu=false venv=$root/.sglang urls=sglang_servers.txt logs=sglang_logs host=127.0.0.1 wait_s=900
dry_run=false more=()
while (($#)); do
  case $1 in
    --count) whole "$1" "${2:-}" 1 256; count=$2; shift ;;
    --tp) whole "$1" "${2:-}" 1 256; tp=$2; shift ;;
    --cpu) cpu=true ;;
    --venv) [[ -n ${2:-} ]] || fail "--venv needs a directory"; venv=$2; shift ;;
    --urls) [[ -n ${2:-} ]] || fail "--urls needs a file"; urls=$2; shift ;;
    --logs) [[ -n ${2:-} ]] || fail "--logs needs a directory"; logs=$2; shift ;;
    --host) [[ -n ${2:-} ]] || fail "--host needs an address"; host=$2; shift ;;
    --wait) whole "$1" "${2:-}" 1 1000000; wait_s=$2; shift ;;
    --dry-run) dry_run=true ;;
    -h | --help) usage; exit 0 ;;
    --) shift; more=("$@"); break ;;
    -*) usage >&2; fail "unknown argument: $1" ;;
    *) [[ -z $model ]] || fail "one model folder, not $model and $1"; model=$1 ;;
  esac
  shift
done
[[ -n $model ]] || { usage >&2; fail "a model folder is needed"; }
[[ $host == 127.0.0.1 || $host == localhost || -n ${EMPO2_API_KEY:-} ]] ||
  fail "--host $host is open to others: set EMPO2_API_KEY, or listen on 127.0.0.1"

program=(-m sglang.launch_server)
settings=(--model-path "$model" --host "$host" --tp "$tp" --weight-version start --enable-metrics)
if $cpu; then
  program=("$root/launch/sglang_cpu/server.py")
  settings+=(--device cpu --attention-backend torch_native --dtype float32 --max-total-tokens 20000
    --mem-fraction-static 0.3 --skip-server-warmup) # its text may have no token in a closed vocabulary, which kills
  export PYTHONPATH=$root/launch/sglang_cpu/stand_in SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
  export SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS=0 # of a crash; there is no CUDA to dump
fi
if $dry_run; then
  for ((i = 0; i < count; i++)); do
    echo "+ $venv/bin/python ${program[*]} ${settings[*]} --port <free> ${more[*]+${more[*]}}"
  done
  exit 0
fi

python=$venv/bin/python
[[ -x $python ]] || fail "$venv has no environment; run bash launch/sglang_cpu.sh or name one with --venv"
[[ -f $model/config.json ]] || fail "$model is no model folder (no config.json)"
version=$("$python" -c 'import importlib.metadata as m; print(m.version("sglang"))' 2>/dev/null) ||
  fail "$venv has no sglang"
[[ $version == 0.5.* ]] || fail "sglang $version in $venv; 0.5.x is what was tried (0.5.23)"
if ! $cpu; then
  gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
  ((gpus >= count * tp)) || fail "$count servers of $tp GPUs need $((count * tp)); this machine has $gpus (--cpu is there)"
fi
[[ -z ${EMPO2_API_KEY:-} ]] || settings+=(--api-key "$EMPO2_API_KEY")
[[ -z ${EMPO2_ADMIN_KEY:-} ]] || settings+=(--admin-api-key "$EMPO2_ADMIN_KEY")

pids=() restarts=()
ended() { ! kill -0 "${pids[$1]}" 2>/dev/null; }
last_words() { grep -v '^[[:space:]]*$' "$logs/server_$1.log" | tail -1 | cut -c1-300; }
stop() {
  trap '' EXIT INT TERM
  rm -f "$urls"
  local pid
  for pid in ${pids[@]+"${pids[@]}"}; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  for _ in {1..30}; do
    for pid in ${pids[@]+"${pids[@]}"}; do kill -0 -- "-$pid" 2>/dev/null && sleep 0.5 && continue 2; done
    break
  done
  for pid in ${pids[@]+"${pids[@]}"}; do kill -KILL -- "-$pid" 2>/dev/null || true; done
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

mkdir -p "$logs"
rm -f "$urls"
# All free ports at once, so that none is given twice.
mapfile -t ports < <("$python" - "$count" <<'PYTHON'
import socket, sys
sockets = [socket.socket() for _ in range(int(sys.argv[1]))]
for each in sockets:
    each.bind(("127.0.0.1", 0))
print(*(each.getsockname()[1] for each in sockets), sep="\n")
PYTHON
)
start() { # a group of its own: a server has children, which end with it
  local devices
  devices=$(seq -s, $(($1 * tp)) $(($1 * tp + tp - 1)))
  CUDA_VISIBLE_DEVICES=$devices setsid "$python" "${program[@]}" "${settings[@]}" --port "${ports[$1]}" \
    ${more[@]+"${more[@]}"} >>"$logs/server_$1.log" 2>&1 </dev/null &
  pids[$1]=$!
  disown
}
healthy() { # one GET /ready without any tool but bash
  exec 9<>"/dev/tcp/127.0.0.1/$1" || return 1
  printf 'GET /ready HTTP/1.0\r\n\r\n' >&9
  local line=''
  read -r -t 5 line <&9 || true
  exec 9>&-
  [[ $line == *" 200 "* ]]
} 2>/dev/null

for ((i = 0; i < count; i++)); do
  : >"$logs/server_$i.log"
  restarts[i]=0
  start "$i"
done
for ((i = 0; i < count; i++)); do
  until healthy "${ports[i]}"; do
    ! ended "$i" || fail "server $i ended while starting: $(last_words "$i")"
    ((SECONDS < wait_s)) || fail "server $i is not ready after $wait_s s; see $logs/server_$i.log"
    sleep 1
  done
done
name=$host
[[ $host != 0.0.0.0 ]] || name=$(hostname)
printf "http://$name:%s\n" "${ports[@]}" >"$urls.new"
mv "$urls.new" "$urls"
echo "sglang_servers: $count ready (sglang $version); their URLs are in $urls"

# A server that ends is started again on its port; the trainer loads the current weights into it.
while sleep 2; do
  for ((i = 0; i < count; i++)); do
    if ended "$i"; then
      ((++restarts[i] <= 5)) || fail "server $i ended six times: $(last_words "$i")"
      echo "sglang_servers: server $i ended and is started again: $(last_words "$i")" >&2
      kill -KILL -- "-${pids[i]}" 2>/dev/null || true # what is left of its group
      start "$i"
    fi
  done
done
