#!/usr/bin/env bash
# Average the last checkpoints of a run.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/average.sh --run DIR [--last N] [--by epoch|update] [--output FILE] [--recalibrate]

  --run DIR      a run of scripts/train.sh
  --last N       how many checkpoints (default: average_last of the configuration, else as many as the run keeps; or all
                 if there are fewer)
  --by WHICH     checkpoints of epochs or of updates (default: those that the run keeps)
  --output FILE  default DIR/checkpoints/averaged.pt
  --recalibrate  re-estimate the norms' running statistics with the averaged weights on the run's training data, and
                 print the validation loss before and after (docs/averaging.md)
  --no-recalibrate
                 average the running statistics, too (the default: recalibrated ones made no difference)

Does nothing if the output was made from these very checkpoints in this very way.
END
}

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=lib/run.sh
source "$root/scripts/lib/run.sh"

run="" last="" by="" output="" recalibrate=0
while [[ $# -gt 0 ]]; do
    case $1 in
    --run) option_value "$1" $#; run=$2; shift 2 ;;
    --last) option_value "$1" $#; last=$2; shift 2 ;;
    --by) option_value "$1" $#; by=$2; shift 2 ;;
    --output) option_value "$1" $#; output=$2; shift 2 ;;
    --recalibrate) recalibrate=1; shift ;;
    --no-recalibrate) recalibrate=0; shift ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument '$1' (see --help)" ;;
    esac
done
use_venv
need python pn-average-checkpoints
check_run "$run"
output=${output:-$run/checkpoints/averaged.pt}
if [[ -z $by ]]; then
    by=epoch
    [[ $(config_value "$run" checkpoint.keep_interval_updates -1) -le 0 ]] || by=update
fi
case $by in
epoch) kept=keep_last_epochs pattern='checkpoint[0-9]*.pt' ;;
update) kept=keep_interval_updates pattern='checkpoint_[0-9]*_[0-9]*.pt' ;;
*) die "--by must be epoch or update, not '$by'" ;;
esac
if [[ -z $last ]]; then
    last=$(config_value "$run" "checkpoint.$kept" -1)
    [[ $last != -1 ]] || die "'$run' keeps all checkpoints: say how many to average with --last"
    last=$(config_value "$run" average_last "$last")
    there=$(find "$run/checkpoints" -maxdepth 1 -name "$pattern" 2>/dev/null | wc -l)
    [[ $there -gt 0 ]] || die "'$run/checkpoints' has no checkpoint of an $by yet (scripts/train.sh makes them)"
    if [[ $there -lt $last ]]; then
        say "the run has $there checkpoints, not yet the $last to be averaged: averaging these"
        last=$there
    fi
fi
check_whole --last "$last"

made="$by $last"
options=()
if [[ $recalibrate -eq 1 ]]; then
    made+=" recalibrated on $(sha256sum <"$(<"$run/data")/settings" | cut -c 1-16)"
    options=(--recalibrate "$(<"$run/data")/bin")
fi
if [[ -f $output ]] && [[ -z $(find "$run/checkpoints" -name 'checkpoint*.pt' -newer "$output" -print -quit) ]] &&
    [[ $(cat "$output.made" 2>/dev/null) == "$made" ]]; then
    say "$output is there already"
    exit 0
fi
# Gone while the output changes: an interruption between the two is not to leave the name of the other way of averaging.
rm -f "$output.made"
cpu_allocator
pn-average-checkpoints --inputs "$run/checkpoints" --last "$last" --by "$by" --output "$output" ${options[@]+"${options[@]}"}
echo "$made" >"$output.made"
