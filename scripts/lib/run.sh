# shellcheck shell=bash
# What score.sh asks of a training run. Sourced, never run. (pn_fairseq/pipeline/runs.py reads a run.)

# check_run RUN: RUN must be one that train.sh made.
check_run() {
    [[ -n $1 ]] || die "--run is needed (see --help)"
    [[ -f $1/config.yaml && -f $1/data ]] ||
        die "'$1' is no training run: it has no config.yaml (scripts/train.sh makes one)"
    [[ -d $(<"$1/data")/bin ]] || die "the data of '$1' is gone: $(<"$1/data")/bin"
}

# check_same_data RUN: the prepared data must be what the run was trained on.
check_same_data() {
    local data
    data=$(<"$1/data")
    [[ ! -f $1/data.settings || ! -f $data/settings ]] || cmp -s "$1/data.settings" "$data/settings" ||
        die "'$data' was prepared anew, with other settings or other text, after '$1' was trained (compare $1/data.settings)"
}
