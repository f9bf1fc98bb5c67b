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

# quoted TEXT: TEXT as one value in hydra's syntax, whatever characters a path has.
quoted() {
    local text=${1//\\/\\\\}
    printf "'%s'" "${text//\'/\\\'}"
}
settings=(
    "common.user_dir=$(quoted "$root/pn_fairseq")" "task.data=$(quoted "$data/bin")"
    "checkpoint.save_dir=$(quoted "$run/checkpoints")" "common.log_file=$(quoted "$run/train.log")"
    "common.tensorboard_logdir=$(quoted "$run/tensorboard")" ${overrides[@]+"${overrides[@]}"}
)

made=0
[[ -d $run ]] || made=1
mkdir -p "$run" 2>/dev/null || die "cannot make the directory '$run' (--run)"
if [[ -d $run/checkpoints ]]; then
    repairs=$(python "$root/scripts/lib/repair_checkpoints.py" "$run/checkpoints") || die "cannot repair $run/checkpoints"
    [[ -z $repairs ]] || while read -r line; do say "$line"; done <<<"$repairs"
fi
answer=$(python "$root/scripts/lib/compose.py" "$file" "$data" "$run" "$run/config.yaml.partial" "${settings[@]}" 2>"$run/compose.err") || {
    code=$?
    reason=$(tail -n 1 "$run/compose.err")
    [[ $code -eq 2 ]] || reason="$reason (all of it in $run/compose.err)"
    [[ $code -ne 2 ]] || rm -f "$run/compose.err"
    [[ $made -eq 0 ]] || rmdir "$run" 2>/dev/null || true
    die "$reason"
}
rm -f "$run/compose.err"
if [[ $answer == finished ]]; then
    rm -f "$run/config.yaml.partial"
    say "$run is trained already"
    exit 0
fi
mv "$run/config.yaml.partial" "$run/config.yaml"
printf '%s\n' "$data" >"$run/data"
cp "$data/settings" "$run/data.settings"

cpu_allocator
# In place of this shell, so that a signal to it reaches fairseq.
exec fairseq-hydra-train --config-dir "$(dirname "$file")" --config-name "$name" \
    "hydra.run.dir=$(quoted "$run/hydra")" "${settings[@]}"
