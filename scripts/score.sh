#!/usr/bin/env bash
# BLEU and chrF of the hypotheses of a run, and whether runs differ significantly.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/score.sh --run DIR [--subset test] [--output DIR] [--compound-split | --no-compound-split]
       scripts/score.sh --compare BASELINE DIR [DIR ...] [--subset test] [--resamples N] [--seed N]

  --run DIR      a run of scripts/train.sh, decoded by scripts/generate.sh
  --subset NAME  test (default) or valid
  --output DIR   what generate.sh was given (default DIR/generate/SUBSET)
  --compound-split, --no-compound-split
                 in the tokenized BLEU, split words with hyphens ("rich ##AT##-##AT## text"), as papers on WMT14 do
                 (default: what the data was prepared for, see compound_split in its settings)

Prints, and writes to scores.txt and scores.json there:
  tokenized BLEU       on the tokens as prepared, what multi-bleu and fairseq-generate print and the paper reports
  detokenized BLEU     sacreBLEU on plain text, with its signature; case is ignored if the data was lower-cased
  chrF                 the same for character n-grams

  --compare DIR DIR ...
                 is the difference between each run and the first more than the choice of test sentences? Paired
                 bootstrap by sacrebleu for the three scores; prints a table and what it means
  --resamples N  resampled sets of sentences (default 1000)
  --seed N       of the resampling (default 12345)
END
}

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=lib/run.sh
source "$root/scripts/lib/run.sh"

run="" subset=test output="" compare=0
runs=() split=() bootstrap=()
while [[ $# -gt 0 ]]; do
    case $1 in
    --run) option_value "$1" $#; run=$2; shift 2 ;;
    --subset) option_value "$1" $#; subset=$2; shift 2 ;;
    --output) option_value "$1" $#; output=$2; shift 2 ;;
    --compound-split | --no-compound-split) split=("$1"); shift ;;
    --compare)
        compare=1
        shift
        while [[ $# -gt 0 && $1 != -* ]]; do
            runs+=("$1")
            shift
        done
        ;;
    --resamples | --seed)
        option_value "$1" $#
        check_whole "$1" "$2"
        bootstrap+=("$1" "$2")
        shift 2
        ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument '$1' (see --help)" ;;
    esac
done

use_venv
need python
if [[ $compare -eq 0 ]]; then
    [[ ${#bootstrap[@]} -eq 0 ]] || die "${bootstrap[0]} goes with --compare (see --help)"
    check_run "$run"
    check_same_data "$run"
    exec python -m pn_fairseq.cli.score one ${split[@]+"${split[@]}"} -- \
        "${output:-$run/generate/$subset}" "$(<"$run/data")" "$subset"
fi
[[ -z $run && -z $output && ${#split[@]} -eq 0 ]] ||
    die "--run, --output and --compound-split do not go with --compare (see --help)"
[[ ${#runs[@]} -ge 2 ]] || die "--compare needs two runs or more, the baseline first (see --help)"
for run in "${runs[@]}"; do
    # What is scored already needs its data no more.
    [[ -f $run/generate/$subset/scores.json ]] || {
        check_run "$run"
        check_same_data "$run"
    }
done
exec python -m pn_fairseq.cli.score compare ${bootstrap[@]+"${bootstrap[@]}"} -- "$subset" "${runs[@]}"
