#!/usr/bin/env bash
# Figure 5 of the PowerNorm paper: BLEU against the tokens of a mini-batch.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/sweep_batch_size.sh [--corpus NAME] [--runs DIR] [--data DIR] [--dry-run] [key=value ...]

BLEU against the tokens of a mini-batch, at 4,096 tokens an update by accumulation: Figure 5 of the PowerNorm paper.
For each of 512, 1,024, 2,048 and 4,096 tokens it calls scripts/reproduce_NAME.sh; then pn-figures draws all runs.

  --corpus NAME  verses (default), iwslt14 or wmt14
  --runs DIR     where the runs go, as DIR/tokens512/NORM_seedN and so on, and the figures, as DIR/figures
                 (default runs/batch_size_NAME)
  --data DIR     the prepared data, made if it is not there (default as of scripts/reproduce_NAME.sh)
  --dry-run      print the commands and do nothing
  key=value      settings for train.sh that differ from those of the corpus

In the environment: NORMS and SEEDS, as of scripts/reproduce_NAME.sh --help. A mini-batch is what all ranks take at
once; every training has one rank (NPROC=1).

Run again, it skips what is done and continues with the rest. A run that fails is named in the report of its size; the
others are still made.
END
}

# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
corpus=verses runs="" data="" dry_run=0 arguments=()
parse_options "$@"
reproduce=$root/scripts/reproduce_$corpus.sh
[[ $corpus == @(verses|iwslt14|wmt14) ]] || die "--corpus $corpus: there are verses, iwslt14 and wmt14"
runs=$(absolute "${runs:-$root/runs/batch_size_$corpus}")
use_venv
need pn-figures
export NPROC=1
failed=0
for tokens in 512 1024 2048 4096; do
    command=("$reproduce" --runs "$runs/tokens$tokens" ${data:+--data "$(absolute "$data")"})
    [[ $dry_run -eq 0 ]] || command+=(--dry-run)
    command+=("dataset.max_tokens=$tokens" tokens_per_update=4096 ${arguments[@]+"${arguments[@]}"})
    step_of_runs "${command[@]}"
done
[[ $dry_run -eq 0 ]] || exit 0
step pn-figures "$runs"/tokens*/*_seed* --output "$runs/figures"
exit "$failed"
