#!/usr/bin/env bash
# Average the last checkpoints of a run.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/average.sh --run DIR [--last N] [--by epoch|update] [--output FILE]

  --run DIR      a run of scripts/train.sh
  --last N       how many checkpoints (default: as many as the run keeps)
  --by WHICH     checkpoints of epochs or of updates (default: those that the run keeps)
  --output FILE  default DIR/checkpoints/averaged.pt

Does nothing if the output was made from these very checkpoints.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=lib/run.sh
source "$root/scripts/lib/run.sh"

run="" last="" by="" output=""
while [[ $# -gt 0 ]]; do
    case $1 in
    --run) option_value "$1" $#; run=$2; shift 2 ;;
    --last) option_value "$1" $#; last=$2; shift 2 ;;
    --by) option_value "$1" $#; by=$2; shift 2 ;;
    --output) option_value "$1" $#; output=$2; shift 2 ;;
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
epoch) last=${last:-$(config_value "$run" checkpoint.keep_last_epochs -1)} ;;
update) last=${last:-$(config_value "$run" checkpoint.keep_interval_updates -1)} ;;
*) die "--by must be epoch or update, not '$by'" ;;
esac
[[ $last != -1 ]] || die "'$run' keeps all checkpoints: say how many to average with --last"
check_whole --last "$last"

if [[ -f $output ]] && [[ -z $(find "$run/checkpoints" -name 'checkpoint*.pt' -newer "$output" -print -quit) ]] &&
    [[ $(cat "$output.made" 2>/dev/null) == "$by $last" ]]; then
    say "$output is there already"
    exit 0
fi
pn-average-checkpoints --inputs "$run/checkpoints" --last "$last" --by "$by" --output "$output"
echo "$by $last" >"$output.made"
