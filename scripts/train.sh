#!/usr/bin/env bash
# Train with the settings of a file in configs/. Run again after an interruption, it goes on where it was.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/train.sh CONFIG [--data DIR] [--run DIR] [key=value ...]

  CONFIG       a name in configs/ (verses_es_en) or the path of a YAML file
  --data DIR   prepared data (default runs/data/CONFIG)
  --run DIR    where checkpoints and logs go (default runs/CONFIG)
  key=value    settings that differ from the file's, in hydra's syntax:
                 model._name=transformer_bn_tiny  common.seed=2  optimization.max_update=400  +model.encoder_layers=2
                 tokens_per_update=65536  common.fp16=true

Trains with fairseq-hydra-train, one worker per visible GPU, or one on the CPU. A run that was interrupted, killed or
pre-empted resumes from its last checkpoint when the same command is given again, on as many workers as there are then;
one that is finished is left alone.

An update takes tokens_per_update tokens whatever the number of workers: dataset.max_tokens is the most that one worker
takes at once, and optimization.update_freq follows. Where it is overridden, optimization.update_freq is meant for one
worker: tokens_per_update is then update_freq x max_tokens.

Workers, by environment variables:
  NPROC=N        N workers on this machine: fewer than its GPUs, or N on the CPU of a machine without
  NNODES=N NODE_RANK=K MASTER_ADDR=HOST [MASTER_PORT=29500]
                 this is machine K, 0 to N-1, of N; HOST is machine 0, where PORT must be free. The same command on
                 each; all see the same files. Started by torchrun.
  START_TIMEOUT=600
                 how many seconds the machines wait for each other
Under SLURM nothing needs to be set, and NNODES, if it is, comes first. One task per machine takes the GPUs of each:
  srun --ntasks-per-node=1 scripts/train.sh CONFIG ...
and one task per GPU works, too. Add --kill-on-bad-exit=1, and to sbatch --requeue: a job that is requeued goes on.

If one worker dies all are stopped, and the exit code is not 0.
END
}

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"

config="" data="" run=""
overrides=()
while [[ $# -gt 0 ]]; do
    case $1 in
    --data) option_value "$1" $#; data=$2; shift 2 ;;
    --run) option_value "$1" $#; run=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    -*) die "unknown option '$1' (see --help)" ;;
    *=*) overrides+=("$1"); shift ;;
    *)
        [[ -z $config ]] || die "unexpected argument '$1': settings are key=value (see --help)"
        config=$1
        shift
        ;;
    esac
done
[[ -n $config ]] || die "which CONFIG? One of: $(cd "$root/configs" && echo *.yaml | sed 's/\.yaml//g') (see --help)"
file=$root/configs/$config.yaml
[[ $config != *.yaml ]] || file=$config
[[ -f $file ]] || die "there is no '$file'; configs/ has: $(cd "$root/configs" && echo *.yaml | sed 's/\.yaml//g')"
name=$(basename "$file" .yaml)
file=$(absolute "$file")
data=$(absolute "${data:-$root/runs/data/$name}")
run=$(absolute "${run:-$root/runs/$name}")
[[ -d $data/bin ]] || die "'$data' is no prepared data: it has no bin/ (scripts/prepare_*.sh make it)"
use_venv
need python fairseq-hydra-train
[[ $data != *:* ]] || die "'$data' has a colon, at which fairseq splits paths; use another place (--data)"

cpu_allocator
# In place of this shell, so that a signal to it reaches the training.
exec python "$root/scripts/lib/start.py" "$file" "$data" "$run" ${overrides[@]+"${overrides[@]}"}
