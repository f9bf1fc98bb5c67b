# shellcheck shell=bash
# Every step from the raw text to the table of a corpus, for a list of norms and seeds. Sourced by reproduce_*.sh, which
# set what differs between corpora:
: "${root:?the top of the repository}"
: "${config:?a name in configs/}"
: "${size:?the architectures are transformer_NORM_SIZE}"
: "${prepare:?the script that prepares the corpus}"
: "${default_seeds:?the seeds unless SEEDS names others}"
: "${about:?a sentence for the usage text}"
# shellcheck source=common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=steps.sh
source "$root/scripts/lib/steps.sh"

reproduce_usage() {
    cat <<END
usage: scripts/$(basename "$0") [--runs DIR] [--data DIR] [--dry-run] [options of $prepare] [key=value ...]

$about
For every norm and seed: train, average, decode, score; then one report over all of them.

  --runs DIR     where the runs go, as DIR/NORM_seedN, and the report, as DIR/report (default runs/$config)
  --data DIR     the prepared data, made if it is not there (default runs/data/$config)
  --dry-run      print the commands and do nothing
  --archive, --bpe, --clean-stage, --sha256, --workers VALUE
                 passed on to $prepare
  key=value      settings for train.sh that differ from configs/$config.yaml

In the environment:
  NORMS="ln bn pnv pn"   the norms, as in transformer_NORM_$size
  SEEDS="$default_seeds"   as many runs are made as there are pairs of norm and seed

Run again, it skips what is done and goes on with the rest. A run that fails is named at the end and in the report, and
the others go on.

One worker per visible GPU; NPROC, NNODES, NODE_RANK and MASTER_ADDR as in train.sh --help. On several machines, which see
the same files, the same command is given on each: all train, and the first one does the rest. In a SLURM job of
several machines it is given once, by the batch script, and starts the training on all by srun.
END
}

# command_line COMMAND...: as one would type it at the top of the repository.
command_line() {
    local line
    line=$(printf ' %q' "$@")
    line=${line# }
    echo "${line//"$(printf %q "$root")/"/}"
}

# do_run NAME ARCH SEED: one run through all steps; a failure is noted in the run's folder and ends this run only.
do_run() {
    local name=$1 run=$runs/$1 arch=$2 seed=$3 step code
    local work=$run.out
    [[ $follower -eq 0 ]] || work+=/machine$NODE_RANK
    local settings=("model._name=$arch" "common.seed=$seed" ${overrides[@]+"${overrides[@]}"})
    local train=(${launch[@]+"${launch[@]}"} "$root/scripts/train.sh" "$config" --data "$data" --run "$run" "${settings[@]}")
    if [[ $dry -eq 1 ]]; then
        command_line "${train[@]}"
        for step in average generate score; do command_line "$root/scripts/$step.sh" --run "$run"; done
        return
    fi
    mkdir -p "$work" 2>/dev/null || die "cannot make the directory '$work' (--runs)"
    for step in "${steps[@]}"; do
        say "$name: $step"
        code=0
        if [[ $step == train ]]; then
            show_training "$work" "$total" "${train[@]}" || code=$?
        else
            show_step "$work" "$step" "$root/scripts/$step.sh" --run "$run" || code=$?
        fi
        case $code in
        0) ;;
        130 | 143) exit "$code" ;;
        *)
            failed+=("$name")
            say "$name failed in $step (all that it said is in $work)"
            [[ $follower -eq 0 ]] || return 0
            mkdir -p "$run"
            echo "$step: $(last_words "$work/$step.err")" >"$run/failed.partial"
            mv "$run/failed.partial" "$run/failed"
            return
            ;;
        esac
    done
    [[ $follower -eq 1 ]] || rm -f "$run/failed"
}

# find_machines: sets launch, the command that starts a training on all machines; follower, 1 on a machine that is not
# the first of several; steps, what is done here for each run.
find_machines() {
    launch=() follower=0 steps=(train average generate score)
    if [[ -n ${NNODES-} ]]; then
        [[ ${NODE_RANK:-0} != 0 ]] || return 0
        follower=1
        steps=(train)
        # The first machine decodes between two trainings, and the others wait for it.
        export START_TIMEOUT=${START_TIMEOUT:-604800}
    elif [[ -n ${SLURM_JOB_ID-} && ${SLURM_JOB_NUM_NODES:-1} -gt 1 ]]; then
        [[ -z ${SLURM_STEP_ID-} ]] || die "start it once, in the batch script and not by srun: it calls srun itself"
        need srun
        launch=(srun --ntasks-per-node=1 --kill-on-bad-exit=1)
    fi
}

# wait_for_data: until the first machine has prepared the corpus.
wait_for_data() {
    [[ -d $data/bin ]] || say "waiting for the first machine to prepare $data"
    until [[ -d $data/bin ]]; do sleep 5; done
}

# reproduce ARGUMENT...
reproduce() {
    local norm seed known
    local norms seeds names=()
    runs=$root/runs/$config data=$root/runs/data/$config dry=0
    overrides=() failed=()
    local prepare_options=()
    while [[ $# -gt 0 ]]; do
        case $1 in
        --runs) option_value "$1" $#; runs=$2; shift 2 ;;
        --data) option_value "$1" $#; data=$2; shift 2 ;;
        --dry-run) dry=1; shift ;;
        --archive | --bpe | --clean-stage | --sha256 | --workers)
            option_value "$1" $#
            prepare_options+=("$1" "$2")
            shift 2
            ;;
        -h | --help) reproduce_usage; exit 0 ;;
        -*) die "unknown option '$1' (see --help)" ;;
        *=*) overrides+=("$1"); shift ;;
        *) die "unexpected argument '$1': settings are key=value (see --help)" ;;
        esac
    done
    use_venv
    need python pn-report
    find_machines
    runs=$(absolute "$runs")
    data=$(absolute "$data")
    read -ra norms <<<"${NORMS-ln bn pnv pn}"
    read -ra seeds <<<"${SEEDS-$default_seeds}"
    [[ ${#norms[@]} -gt 0 && ${#seeds[@]} -gt 0 ]] || die "NORMS and SEEDS must each name at least one"
    known=" $(cd "$root" && python -c 'from pn_fairseq.norms import NORMS; print(*(entry.short for entry in NORMS.values()))') "
    for norm in "${norms[@]}"; do
        [[ $known == *" $norm "* ]] || die "NORMS: '$norm' is no norm; there are${known% }"
    done
    for seed in "${seeds[@]}"; do check_whole SEEDS "$seed"; done
    for norm in "${norms[@]}"; do
        for seed in "${seeds[@]}"; do names+=("${norm}_seed$seed"); done
    done
    seed=$(printf '%s\n' "${names[@]}" | sort | uniq -d | head -n 1)
    [[ -z $seed ]] || die "NORMS and SEEDS name $seed twice"

    local prepared=("$root/scripts/$prepare" --dest "$data" ${prepare_options[@]+"${prepare_options[@]}"})
    local report=(pn-report "${names[@]/#/$runs/}" --output "$runs/report")
    if [[ $dry -eq 1 ]]; then
        command_line "${prepared[@]}"
    else
        # An interruption ends everything, not only the step that it hits.
        trap 'exit 130' INT
        trap 'exit 143' TERM
        if [[ $follower -eq 1 ]]; then wait_for_data; else "${prepared[@]}" || exit $?; fi
        total=$(total_updates "$root/configs/$config.yaml" ${overrides[@]+"${overrides[@]}"})
    fi
    for norm in "${norms[@]}"; do
        for seed in "${seeds[@]}"; do
            do_run "${norm}_seed$seed" "transformer_${norm}_$size" "$seed"
        done
    done
    if [[ $dry -eq 1 ]]; then
        command_line "${report[@]}"
        return
    fi
    if [[ $follower -eq 1 ]]; then
        [[ ${#failed[@]} -eq 0 ]] || exit 1
        return
    fi
    say "report"
    "${report[@]}" || die "pn-report failed (its reason stands above); the runs are in $runs"
    [[ ${#failed[@]} -eq 0 ]] || {
        say "${#failed[@]} of ${#names[@]} runs failed: ${failed[*]} (the report says why); the same command tries them again"
        exit 1
    }
}
