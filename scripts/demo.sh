#!/usr/bin/env bash
# The whole way on the corpus in the repository: prepare, train, average, decode, score. Called by `make demo`.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/demo.sh [--run DIR] [--arch NAME] [key=value ...]

Trains a small pre-norm transformer with PN in the encoder on Spanish-English verses, with the settings of
configs/verses_es_en.yaml, and prints BLEU, sample translations and where the learning curve is.

  --run DIR    where everything goes (default runs/demo)
  --arch NAME  transformer_pn_tiny (default), transformer_ln_tiny, transformer_bn_tiny, transformer_pnv_tiny
  key=value    settings for scripts/train.sh

Run again, it goes on where it was.
END
}

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=lib/run.sh
source "$root/scripts/lib/run.sh"
# shellcheck source=lib/steps.sh
source "$root/scripts/lib/steps.sh"

run=$root/runs/demo arch=transformer_pn_tiny
overrides=()
while [[ $# -gt 0 ]]; do
    case $1 in
    --run) option_value "$1" $#; run=$2; shift 2 ;;
    --arch) option_value "$1" $#; arch=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *=*) overrides+=("$1"); shift ;;
    *) die "unknown argument '$1' (see --help)" ;;
    esac
done
use_venv
need python pn-plot-curves
run=$(absolute "$run")
data=$root/runs/data/verses_es_en
# What the training prints goes beside the run, which is not there before the settings are found to fit.
work=$run.out
mkdir -p "$work" 2>/dev/null || die "cannot make the directory '$work' (--run)"

say "1/5 preparing the corpus"
bash "$root/scripts/prepare_verses.sh" --dest "$data"

say "2/5 training $arch"
total=$(total_updates "$root/configs/verses_es_en.yaml" ${overrides[@]+"${overrides[@]}"})
code=0
show_training "$work" "$total" bash "$root/scripts/train.sh" verses_es_en --data "$data" --run "$run" \
    "model._name=$arch" ${overrides[@]+"${overrides[@]}"} || code=$?
[[ $code -ne 2 ]] || exit 2
[[ $code -eq 0 ]] ||
    die "training failed: $(last_words "$work/train.err") (all of it in $work/train.err); run the same command again to go on"

say "3/5 averaging checkpoints"
bash "$root/scripts/average.sh" --run "$run"

say "4/5 decoding the test set"
bash "$root/scripts/generate.sh" --run "$run"

say "5/5 scoring"
pn-plot-curves "$run" --labels "$arch" --output "$run/learning_curve.png" >/dev/null
echo
echo "Sample translations"
result=$run/generate/test
count=$(lines "$result/hyp.tok")
scores=$(bash "$root/scripts/score.sh" --run "$run")
for number in 1 2 3 4 5; do
    line=$((number * count / 6))
    echo "  source      $(sed -n "${line}p" "$data/raw/test.es")"
    echo "  reference   $(sed -n "${line}p" "$data/raw/test.en")"
    echo "  translation $(sed -n "${line}p" "$result/hyp.txt")"
    echo
done
echo "$scores"
echo "learning curve:   $run/learning_curve.png"
