#!/usr/bin/env bash
# Which norm when: every norm on the corpora that a laptop can train, seed by seed, and a report for each corpus.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/compare_norms.sh [--runs DIR] [--multi30k DIR] [--only CORPUS] [--dry-run]

Trains, averages, decodes and scores what `manifest` in this file lists, in its order. Three seeds: the norms of the
PowerNorm paper's Table 4 and some more, layer-scale, the variants `release`, BN in the decoder. One seed: all other
norms, PN in the decoder, the decays of PN, learning rates of PN and LN. It calls scripts/reproduce_verses.sh and
scripts/reproduce_multi30k.sh. The results are in docs/results.

  --runs DIR      where the runs go, as DIR/CORPUS/NORM_seedN, and the reports, as DIR/CORPUS/report, with all scores in
                  report.csv (default runs/compare_norms)
  --multi30k DIR  the text of Multi30k (scripts/prepare_multi30k.sh --help); without it that corpus is left out
  --only CORPUS   verses or multi30k
  --dry-run       print the commands and do nothing

Some 80 runs of 8 minutes on 2 CPU cores. Stop it at any time; run again, it skips what is done and continues. A
run that fails is named in the report; the others are still made. One rank per visible GPU.
END
}

# corpus, folder of its runs, seed, norms as in NORMS of scripts/reproduce_*.sh, and settings of train.sh.
manifest() {
    local seed short
    # On Multi30k half the updates of the verses, 3 epochs: configs/multi30k_de_en.yaml trains 33, too long for 18 runs on
    # a CPU. The average is over updates 600 to 800.
    short="optimization.max_update=800 lr_scheduler.warmup_updates=200 tokens_per_update=2048 checkpoint.save_interval_updates=50"
    for seed in 1 2 3; do
        echo "verses|verses|$seed|ln pn bn pnv rms gn brn mabn ada un"
        echo "verses|verses|$seed|pn+layer_scale_groups=0 ln+layer_scale_groups=4 pn+norm_variant=release bn+norm_variant=release bn+decoder_norm=batch"
        [[ $seed -gt 1 ]] || echo "verses|verses|1|none lns dn sn dyt derf rbn prepbn pn+decoder_norm=power"
        echo "multi30k|multi30k|$seed|ln pn bn pnv pn+layer_scale_groups=0 rms|$short"
    done
    # As the paper tuned them; 0.9 and 0.9 are the defaults above.
    echo "verses|verses|1|$(for forward in 0.9 0.95 0.99; do
        for backward in 0.9 0.95 0.99; do
            [[ $forward$backward == 0.90.9 ]] || printf 'pn+norm_alpha_fwd=%s+norm_alpha_bwd=%s ' "$forward" "$backward"
        done
    done)"
    # Half and twice the learning rate of configs/verses_es_en.yaml: is the ranking one of learning rates?
    echo "verses|verses_lr0.0025|1|ln pn|optimization.lr=[0.0025]"
    echo "verses|verses_lr0.01|1|ln pn|optimization.lr=[0.01]"
}

# Comparisons with LN that were planned before the runs, as `pn report --planned` takes them: validation loss, and test
# loss of language models. They are tested apart, without correction for the other comparisons.
# shellcheck disable=SC2034  # docs/tools/results.py reads it
planned="PN:loss PN:bits"

# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
runs=$root/runs/compare_norms multi30k="" only="" dry_run=0
parse_options "$@"
[[ -z $only || $only == verses || $only == multi30k ]] || die "--only $only: there are verses and multi30k"
[[ $only != multi30k || -n $multi30k ]] || die "--only multi30k needs --multi30k DIR, the folder with its text"
[[ -z $multi30k || -d $multi30k ]] || die "--multi30k $multi30k is not a directory"
use_venv
need python pn-report
runs=$(absolute "$runs")

failed=0
declare -A folders=()
while IFS='|' read -r corpus folder seed norms setting; do
    [[ -z $only || $corpus == "$only" ]] || continue
    [[ $corpus != multi30k || -n $multi30k ]] || continue
    command=("$root/scripts/reproduce_$corpus.sh" --runs "$runs/$folder")
    [[ $corpus != multi30k ]] || command+=(--corpus "$(absolute "$multi30k")")
    [[ $dry_run -eq 0 ]] || command+=(--dry-run)
    read -ra settings <<<"$setting"
    command+=(${settings[@]+"${settings[@]}"})
    NORMS=$norms SEEDS=$seed step_of_runs "${command[@]}" </dev/null
    folders[$folder]=1
done < <(manifest)

[[ $dry_run -eq 0 ]] || exit 0
for folder in "${!folders[@]}"; do
    step pn-report "$runs/$folder"/*_seed* --output "$runs/$folder/report"
done
[[ $failed -eq 0 ]] || say "some runs failed; the reports in $runs/*/report say which and why"
exit "$failed"
