# shellcheck shell=bash
# Every step from the raw text to the table of a corpus, for a list of norms and seeds. Sourced by reproduce_*.sh, which
# set what differs between corpora:
: "${config:?a name in configs/}"
: "${size:?the architectures are MODEL_NORM_SIZE}"
: "${prepare:?the script that prepares the corpus}"
: "${default_seeds:?the seeds unless SEEDS names others}"
about=$(sed -n '2s/^# //p' "$0") # a sentence for the usage text
# and, unless they are those of a translation:
: "${models:=transformer}" "${default_norms:=ln bn pnv pn}"
# what is done after the training, scripts/STEP.sh
: "${after:=average generate score}"

usage() {
    local run=NORM_seedN
    [[ $models != *" "* ]] || run=MODEL_NORM_seedN
    cat <<END
usage: scripts/$(basename "$0") [--runs DIR] [--data DIR] [--dry-run] [options of $prepare] [key=value ...]

$about
For every norm and seed: train, ${after// /, }; then one report over all of them.

  --runs DIR     where the runs go, as DIR/$run, and the report, as DIR/report (default runs/$config)
  --data DIR     the prepared data, made if it is not there (default runs/data/$config)
  --dry-run      print the commands and do nothing
$(prepare_options | awk -v prepare="$prepare" '{ printf "  %-13s  passed on to %s\n", $0, prepare }')
  key=value      settings for train.sh that differ from configs/$config.yaml

In the environment:
  NORMS="$default_norms"
                 the norms, as in ${models%% *}_NORM_$size; NORM+key=value has a setting of the model's
  SEEDS="$default_seeds"
                 one run is made for each norm and seed
END
    [[ $models != *" "* ]] || cat <<END
  MODELS="$models"
                 and for each of these models
END
    [[ -z ${tables-} ]] || cat <<END
  TABLE=NAME     instead of NORMS: the rows of a published table, with its config (the runs go to runs/CONFIG). The
                 report, DIR/report-NAME, has the published numbers. NAME is one of
                 $tables
END
    cat <<END

Run again, it skips what is done and continues with the rest. A run that fails is named at the end and in the report;
the others are still made.

One rank per visible GPU; NPROC, NNODES, NODE_RANK and MASTER_ADDR as in train.sh --help. On several machines, which see
the same files, give the same command on each: all train, and the first one does the rest; the others wait for it, so
end them if it has failed. In a SLURM job of several machines, call it once in the batch script: it trains by srun.
END
}

# prepare_options: the options of the preparation that are passed on to it, as its usage text has them.
prepare_options() {
    "$root/scripts/$prepare" --help | usage_options | grep -v -e '^--dest' || true
}

# shellcheck source=common.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"

# print_or_step COMMAND...: `step`, or in a dry run the command as one would type it at the top of the repository.
print_or_step() {
    local line
    if [[ $dry_run -eq 0 ]]; then
        step "$@"
        return
    fi
    line=$(printf ' %q' "$@")
    line=${line# }
    echo "${line//"$(printf %q "$root")/"/}"
}

# find_machines: sets launch, the command that starts a training on all machines; follower, 1 on a machine that is not
# the first of several; steps, what is done here for each run.
find_machines() {
    launch=() follower=0
    read -ra steps <<<"train $after"
    if [[ -n ${NNODES-} ]]; then
        [[ ${NODE_RANK:-0} != 0 && $dry_run -eq 0 ]] || return 0
        follower=1
        steps=(train)
        # The first machine decodes between two trainings, and the others wait for it.
        export START_TIMEOUT=${START_TIMEOUT:-604800}
    elif [[ -n ${SLURM_JOB_ID-} && ${SLURM_JOB_NUM_NODES:-1} -gt 1 ]]; then
        # srun alone sets SLURM_STEP_NUM_TASKS.
        [[ -z ${SLURM_STEP_NUM_TASKS-} ]] || die "call it once, in the batch script and not by srun: it calls srun itself"
        need srun
        launch=(srun --ntasks-per-node=1 --kill-on-bad-exit=1)
    fi
}

# attempt FILE COMMAND...: as `step`, but with its messages in FILE, too, and a failure is the caller's business.
messages=""
attempt() {
    local file=$1 code=0 reader
    shift
    # It ends with its input and not by a signal to all, which would lose the last words.
    exec {messages}> >(trap '' INT TERM && exec tee "$file" >&2)
    reader=$!
    PN_FAIRSEQ_STEP=1 "$@" 2>&"$messages" &
    wait $! || code=$?
    close_messages
    wait "$reader" || true
    return "$code"
}
close_messages() {
    [[ -z $messages ]] || exec {messages}>&-
    messages=""
}
# `interrupted` waits for all children, so also for the reader, which ends when its input is closed.
trap 'close_messages; interrupted 130' INT
trap 'close_messages; interrupted 143' TERM

# do_run NAME ARCH SEED SETTING...: one run through all steps; a failure is noted in the run's folder and ends this run only.
do_run() {
    local name=$1 run=$runs/$1 step code command
    # Not beside the runs: pn-report DIR/*_seed* finds runs alone.
    local work=$runs/logs/$1
    [[ $follower -eq 0 ]] || work+=/machine$NODE_RANK
    [[ $dry_run -eq 1 ]] || mkdir -p "$work" 2>/dev/null || die "cannot make the directory '$work' (--runs)"
    for step in "${steps[@]}"; do
        command=("$root/scripts/$step.sh" --run "$run")
        if [[ $step == train ]]; then
            command=(${launch[@]+"${launch[@]}"} "$root/scripts/train.sh" "$config" --data "$data" --run "$run")
            command+=("model._name=$2" "common.seed=$3" "${@:4}" ${arguments[@]+"${arguments[@]}"})
        fi
        if [[ $dry_run -eq 1 ]]; then
            print_or_step "${command[@]}"
            continue
        fi
        say "$name: $step"
        code=0
        attempt "$work/$step.err" "${command[@]}" || code=$?
        [[ $code -ne 130 && $code -ne 143 ]] || exit "$code"
        if [[ $code -ne 0 ]]; then
            failed+=("$name")
            say "$name failed in $step (its messages are in $work)"
            [[ $follower -eq 0 ]] || return 0
            mkdir -p "$run"
            echo "$step: $(grep -v '^[[:space:]]*$' "$work/$step.err" | tail -n 1)" >"$run/failed.partial"
            mv "$run/failed.partial" "$run/failed"
            return 0
        fi
    done
    [[ $follower -eq 1 || $dry_run -eq 1 ]] || rm -f "$run/failed"
}

runs="" data=$root/runs/data/$config dry_run=0 arguments=()
parse_options "$@"
for argument in ${arguments[@]+"${arguments[@]}"}; do
    [[ $argument == *=* ]] || die "unexpected argument '$argument': settings are key=value (see --help)"
done
use_venv
need python pn-report
find_machines
report_name=report beside=()
if [[ -n ${TABLE-} ]]; then
    [[ -z ${NORMS+set} ]] || die "TABLE and NORMS both say which norms: give one of them"
    rows=$(cd "$root" && python -c "from pn_fairseq.report.paper import print_tables; print_tables('$config')")
    known=$(awk '{ print $1 }' <<<"$rows" | xargs)
    # shellcheck disable=SC2086 # several tables are several words
    [[ " $known " == *" $TABLE "* ]] ||
        die "TABLE: unknown table '$TABLE'$(did_you_mean "$TABLE" $known); there are ${known:-none of this corpus}"
    read -r _ config NORMS < <(awk -v table="$TABLE" '$1 == table' <<<"$rows")
    report_name=report-$TABLE beside=(--paper "$TABLE")
fi
runs=$(absolute "${runs:-$root/runs/$config}")
data=$(absolute "$data")
failed=()
prefix="" known=$models
if [[ $models == *" "* ]]; then
    prefix=1 models=${MODELS-$models}
fi
for model in $models; do
    [[ " $known " == *" $model "* ]] || die "MODELS: unknown model '$model'; there are $known"
done
read -ra norms <<<"${NORMS-$default_norms}"
read -ra seeds <<<"${SEEDS-$default_seeds}"
[[ ${#norms[@]} -gt 0 && ${#seeds[@]} -gt 0 ]] || die "NORMS and SEEDS must each name at least one"
known=$(cd "$root" && python -c 'from pn_fairseq.norms import NORMS; print(*(entry.short for entry in NORMS.values()))')
for norm in "${norms[@]%%+*}"; do
    # shellcheck disable=SC2086 # several norms are several words
    [[ " $known " == *" $norm "* ]] || die "NORMS: unknown norm '$norm'$(did_you_mean "$norm" $known); there are $known"
done
for seed in "${seeds[@]}"; do check_whole SEEDS "$seed"; done
# The arguments of do_run for every run, and the runs' names.
runs_to_do=()
for model in $models; do
    for norm in "${norms[@]}"; do
        settings=${norm#"${norm%%+*}"}
        for seed in "${seeds[@]}"; do
            runs_to_do+=("${prefix:+${model}_}${norm}_seed$seed ${model}_${norm%%+*}_$size $seed${settings//+/ model.}")
        done
    done
done
names=("${runs_to_do[@]%% *}")
twice=$(printf '%s\n' "${names[@]}" | sort | uniq -d | head -n 1)
[[ -z $twice ]] || die "NORMS and SEEDS name $twice twice"

preparation=("$root/scripts/$prepare" --dest "$data")
while read -r option value; do
    [[ -z ${given[$option]+set} ]] || preparation+=("$option" ${value:+"${given[$option]}"})
done < <(prepare_options)
report=(pn-report "${names[@]/#/$runs/}" --output "$runs/$report_name" ${beside[@]+"${beside[@]}"})

# Before the hours of the preparation.
[[ $dry_run -eq 1 ]] ||
    step "$root/scripts/train.sh" "$config" --check "model._name=${models%% *}_${norms[0]%%+*}_$size" ${arguments[@]+"${arguments[@]}"}
if [[ $follower -eq 0 ]]; then
    print_or_step "${preparation[@]}"
else
    [[ -d $data/bin ]] || say "waiting for the first machine to prepare $data"
    until [[ -d $data/bin ]]; do step sleep 5; done
fi
for run in "${runs_to_do[@]}"; do
    read -ra words <<<"$run"
    do_run "${words[@]}"
done
if [[ $follower -eq 0 ]]; then
    [[ $dry_run -eq 1 ]] || say "report"
    print_or_step "${report[@]}"
    [[ ${#failed[@]} -eq 0 ]] ||
        say "${#failed[@]} of ${#names[@]} runs failed: ${failed[*]} (the report says why); the same command tries them again"
fi
[[ ${#failed[@]} -eq 0 ]] || exit 1
