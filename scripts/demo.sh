#!/usr/bin/env bash
# The whole pipeline on the corpus in the repository: prepare, train, average, decode, score. Called by `make demo`.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/demo.sh [--run DIR] [--arch NAME] [key=value ...]

Trains a small pre-norm transformer with PN in the encoder on Spanish-English verses, with the settings of
configs/verses_es_en.yaml, and prints BLEU, sample translations and where the learning curve is.

  --run DIR    where everything goes (default runs/demo)
  --arch NAME  transformer_pn_tiny (default), transformer_ln_tiny, transformer_bn_tiny, transformer_pnv_tiny
  key=value    settings for scripts/train.sh

Run again, it resumes where it was interrupted.
END
}

# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
run=$root/runs/demo arch=transformer_pn_tiny arguments=()
parse_options "$@"
use_venv
need python pn-report

data=$root/runs/data/verses_es_en
result=$run/generate/test
train=("$root/scripts/train.sh" verses_es_en --data "$data" --run "$run" "model._name=$arch" ${arguments[@]+"${arguments[@]}"})

# Before the minutes of the preparation.
step "${train[@]}" --check

say "1/5 preparing the corpus"
step "$root/scripts/prepare_verses.sh" --dest "$data"

say "2/5 training $arch"
step "${train[@]}"

say "3/5 averaging checkpoints"
step "$root/scripts/average.sh" --run "$run"

say "4/5 decoding the test set"
step "$root/scripts/generate.sh" --run "$run"

say "5/5 scoring"
step "$root/scripts/score.sh" --run "$run" >/dev/null
step pn-report "$run" --output "$run/report" >/dev/null
echo
echo "Sample translations"
count=$(wc -l <"$result/hyp.tok")
for number in 1 2 3 4 5; do
    line=$((number * count / 6))
    echo "  source      $(sed -n "${line}p" "$data/raw/test.es")"
    echo "  reference   $(sed -n "${line}p" "$data/raw/test.en")"
    echo "  translation $(sed -n "${line}p" "$result/hyp.txt")"
    echo
done
cat "$result/scores.txt"
echo "learning curve:   $run/report/report-curves-1.png"
