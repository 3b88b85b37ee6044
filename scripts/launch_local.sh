#!/usr/bin/env bash
# One node: starts the ranks with torchrun. `--help` prints the usage; see also docs/cluster.md.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: scripts/launch_local.sh CONFIG.yaml [section.key=value | --option]...
       scripts/launch_local.sh [--config FILE.yaml] pretrain_gpt.py [Megatron flag]...

Starts one process for each rank on this machine, with torchrun. A YAML configuration is trained by
`chunkgraph train`, a script by `python -m chunkgraph.launch`; what follows is theirs.

Environment variables:
  CHUNKGRAPH_NPROC_PER_NODE  ranks to start (default: the GPUs that nvidia-smi lists, otherwise 1)
  CHUNKGRAPH_PYTHON          Python to run (default: .venv/bin/python here, otherwise python3)
  CHUNKGRAPH_TORCHRUN_ARGS   further torchrun options, separated by blanks
  CHUNKGRAPH_GRACE_S         seconds that ranks get to end after Ctrl-C or SIGTERM (default: 30)

The exit code is that of the rank that failed first; 130 after Ctrl-C, 143 after SIGTERM.
HELP
}

fail() {
  echo "launch_local.sh: $1" >&2
  exit 2
}

case "${1:-}" in
  -h | --help)
    usage
    exit 0
    ;;
  "")
    usage >&2
    exit 2
    ;;
  --config)
    (($# >= 3)) || fail "--config FILE.yaml needs a script after it"
    target=(-m chunkgraph.launch) file=$3
    ;;
  --config=*)
    (($# >= 2)) || fail "--config=FILE.yaml needs a script after it"
    target=(-m chunkgraph.launch) file=$2
    ;;
  *.yaml | *.yml) target=(-m chunkgraph.cli train) file=$1 ;;
  *.py) target=(-m chunkgraph.launch) file=$1 ;;
  *) fail "'$1' is neither a .yaml configuration nor a .py script; see --help" ;;
esac
# Checked here, since each rank would print its own message.
[[ -f $file ]] || fail "there is no file '$file'"

python=${CHUNKGRAPH_PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; fi
fi
command -v "$python" >/dev/null || fail "CHUNKGRAPH_PYTHON: there is no program '$python'"

nproc=${CHUNKGRAPH_NPROC_PER_NODE:-}
if [[ -z $nproc ]]; then
  # Without a driver, nvidia-smi prints its error on standard output.
  nproc=$({ nvidia-smi -L 2>/dev/null || true; } | { grep -c '^GPU' || true; })
  if ((nproc == 0)); then nproc=1; fi
fi
[[ $nproc =~ ^[1-9][0-9]*$ ]] || fail "CHUNKGRAPH_NPROC_PER_NODE is '$nproc'; expected a number from 1"

read -r -a torchrun_args <<<"${CHUNKGRAPH_TORCHRUN_ARGS:-}"
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${CHUNKGRAPH_GRACE_S:-30}

# exec: signals then reach torchrun itself, which passes them on to the ranks and waits for them.
exec "$python" -m chunkgraph.jobs.torchrun --standalone --nproc-per-node="$nproc" \
  ${torchrun_args[@]+"${torchrun_args[@]}"} "${target[@]}" "$@"
