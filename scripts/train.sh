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

Trains with fairseq-hydra-train, on every visible GPU or else on the CPU. A run that was interrupted resumes from its
last checkpoint; one that is finished is left alone.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
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
mkdir -p "$run" || die "cannot make the directory '$run' (--run)"

command=(
    fairseq-hydra-train --config-dir "$(dirname "$file")" --config-name "$name"
    "common.user_dir=$root/pn_fairseq" "task.data=$data/bin" "checkpoint.save_dir=$run/checkpoints"
    "common.log_file=$run/train.log" "common.tensorboard_logdir=$run/tensorboard" "hydra.run.dir=$run/hydra"
    ${overrides[@]+"${overrides[@]}"}
)

# Composing the configuration first tells a mistyped setting in one line, and what the run is made with.
PYTHONWARNINGS=ignore "${command[@]}" --cfg job >"$run/config.yaml.partial" 2>"$run/config.err" || {
    reason=$(grep -m1 -E "^(Could not|Key |Error|LexerNoViableAltException|mismatched|Cannot|.*[Ee]rror.*)" "$run/config.err" || tail -n 1 "$run/config.err")
    rm -f "$run/config.yaml.partial" "$run/config.err"
    rmdir "$run" 2>/dev/null || true
    die "the settings do not fit: $reason"
}
rm -f "$run/config.err"

# Settings that say when to stop or how to report may change between two stints of one run; others may not.
comparable() { grep -v -E '^ *(max_update|max_epoch|stop_time_hours|patience|log_interval|log_format|num_workers):' "$1"; }
if [[ -f $run/config.yaml ]]; then
    if ! difference=$(diff <(comparable "$run/config.yaml") <(comparable "$run/config.yaml.partial")); then
        rm -f "$run/config.yaml.partial"
        die "'$run' was begun with other settings ($(grep -m3 '^[<>]' <<<"$difference" | tr -s ' ' | paste -sd, -)); name another --run or remove it"
    fi
    if cmp -s "$run/config.yaml" "$run/config.yaml.partial" && tail -n 1 "$run/train.log" 2>/dev/null | grep -q 'done training'; then
        rm -f "$run/config.yaml.partial"
        say "$run is trained already"
        exit 0
    fi
fi
mv "$run/config.yaml.partial" "$run/config.yaml"
printf '%s\n' "$data" >"$run/data"

if [[ -d $run/checkpoints ]]; then
    while read -r line; do say "$line"; done < <(python "$root/scripts/lib/repair_checkpoints.py" "$run/checkpoints")
fi

cpu_allocator
# In place of this shell, so that a signal to it reaches fairseq.
exec "${command[@]}"
