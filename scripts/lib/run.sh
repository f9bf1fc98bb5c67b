# shellcheck shell=bash
# What the scripts that work on a training run share. Sourced, never run.
#
# A run is a directory:
#   config.yaml   every setting, as hydra composed it      data          the prepared data, by absolute path
#   train.log     fairseq's log, one JSON record a line    checkpoints/  fairseq's checkpoints, and averaged.pt
#   tensorboard/  the same for TensorBoard                 generate/     hypotheses and scores
: "${root:?the sourcing script sets it to the top of the repository}"

# config_value RUN KEY [DEFAULT]: a setting of the run.
config_value() {
    local run=$1
    shift
    python "$root/scripts/lib/config_value.py" "$run/config.yaml" "$@"
}

# check_run RUN: RUN must be one that train.sh made.
check_run() {
    [[ -n $1 ]] || die "--run is needed (see --help)"
    [[ -f $1/config.yaml && -f $1/data ]] || die "'$1' is no training run: it has no config.yaml (scripts/train.sh makes one)"
    [[ -d $(<"$1/data")/bin ]] || die "the data of '$1' is gone: $(<"$1/data")/bin"
}

# check_same_data RUN: the prepared data must be what the run was trained on.
check_same_data() {
    local data
    data=$(<"$1/data")
    [[ ! -f $1/data.settings || ! -f $data/settings ]] || cmp -s "$1/data.settings" "$data/settings" ||
        die "'$data' was prepared anew, with other settings or other text, after '$1' was trained (compare $1/data.settings)"
}

# data_setting DATA NAME: a setting that the prepared data was made with.
data_setting() { sed -n "s/^$2=//p" "$1/settings"; }
