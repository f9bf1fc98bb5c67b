#!/usr/bin/env bash
# BLEU of the hypotheses of a run, in both flavours.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/score.sh --run DIR [--subset test] [--output DIR]

  --run DIR      a run of scripts/train.sh, decoded by scripts/generate.sh
  --subset NAME  test (default) or valid
  --output DIR   what generate.sh was given (default DIR/generate/SUBSET)

Prints, and writes to scores.txt there:
  tokenized BLEU       on the tokens as prepared, what multi-bleu and fairseq-generate print and the paper reports
  detokenized BLEU     sacreBLEU on plain text, with its signature; case is ignored if the data was lower-cased
END
}

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=lib/run.sh
source "$root/scripts/lib/run.sh"

run="" subset=test output=""
while [[ $# -gt 0 ]]; do
    case $1 in
    --run) option_value "$1" $#; run=$2; shift 2 ;;
    --subset) option_value "$1" $#; subset=$2; shift 2 ;;
    --output) option_value "$1" $#; output=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument '$1' (see --help)" ;;
    esac
done
use_venv
need python sacrebleu sacremoses
check_run "$run"
output=${output:-$run/generate/$subset}
[[ -f $output/hyp.tok ]] || die "there is no '$output/hyp.tok' (scripts/generate.sh makes it)"
data=$(<"$run/data")
target=$(data_setting "$data" target)
same_lines "$data/raw/$subset.$target" "$output/hyp.tok"

export PYTHONUTF8=1
# sacremoses leaves typographic quotation marks and apostrophes apart from their words.
# shellcheck disable=SC1112 # these quotation marks are meant
join_quotes() { sed -E 's/ ’ (s|t|d|m|re|ve|ll)\b/’\1/g; s/([“‘]) /\1/g; s/ ([”’])/\1/g'; }
detokenize() { sacremoses -l "$target" -q detokenize <"$output/hyp.tok" | join_quotes; }
rm -f "$output/hyp.txt"
make_file "$output/hyp.txt" detokenize
same_lines "$output/hyp.tok" "$output/hyp.txt"

case_option=()
[[ $(data_setting "$data" lower) -ne 1 ]] || case_option=(-lc)
bleu() {
    sacrebleu "$@" -m bleu -w 2 -f text 2>"$output/score.err" || die "sacrebleu failed: $(tail -n 1 "$output/score.err")"
    rm -f "$output/score.err"
}
tokenized=$(bleu "$data/tok/$subset.$target" -i "$output/hyp.tok" --tokenize none --smooth-method none --force)
detokenized=$(bleu "$data/raw/$subset.$target" -i "$output/hyp.txt" ${case_option[@]+"${case_option[@]}"})
rm -f "$output/scores.txt"
make_file "$output/scores.txt" printf '%s\n' "tokenized BLEU:   $tokenized" "detokenized BLEU: $detokenized"
cat "$output/scores.txt"
