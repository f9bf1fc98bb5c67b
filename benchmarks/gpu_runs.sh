#!/usr/bin/env bash
# Train several models side by side on one GPU for a limited time, and go on another time.
#   benchmarks/gpu_runs.sh LIST OUT SECONDS
# Each line of LIST (such as benchmarks/gpu_runs.txt) has the words of a `pn` command; # begins a comment. All start at
# once in the current folder, and end after SECONDS at the latest. OUT receives, every minute and at the end,
#   runs.tar        runs/ without runs/data; where it is there at the beginning, the commands resume from it
#   small.tar.gz    its files of at most 256 KiB: logs, settings, scores
# runs/logs/N.log has what command N printed.
# Variables: PN=pn  EVERY=60 (seconds between two copies)
set -euo pipefail
pn=${PN:-pn} every=${EVERY:-60}
say() { echo "[gpu_runs.sh] $*" >&2; }
die() { echo "gpu_runs.sh: error: $*" >&2 && exit 2; }
[[ ${1-} != --help ]] || { sed -n '2,/^set/s/^# \?//p' "$0" && exit; }
[[ $# -eq 3 && $3 =~ ^[1-9][0-9]*$ ]] || die "expected LIST OUT SECONDS (see --help)"
list=$1 out=$2 seconds=$3
[[ -f $list ]] || die "there is no list '$list'"
command -v "$pn" >/dev/null || die "there is no '$pn' (PN=...)"
mapfile -t lines < <(sed 's/#.*//; /^[[:space:]]*$/d' "$list")
((${#lines[@]})) || die "'$list' names no command"

mkdir -p "$out" runs/logs
if [[ -f $out/runs.tar ]]; then
    tar -xf "$out/runs.tar" --keep-newer-files 2>/dev/null || die "'$out/runs.tar' cannot be unpacked"
    say "goes on from $out/runs.tar"
fi

# A checkpoint appears under its name when it is complete. Files change and vanish while tar reads, which it reports
# with 1, or with 2 where a list names them; only an archive that is complete replaces the last one.
copy() {
    local all=$out/runs.tar small=$out/small.tar.gz names=$out/small.partial
    tar -cf "$all.partial" --exclude=runs/data --exclude='*.partial' runs 2>"$out/copy.log" || (($? == 1)) || return
    mv "$all.partial" "$all"
    find runs -ignore_readdir_race -path runs/data -prune -o -type f ! -name '*.partial' -size -257k -print0 >"$names" ||
        return
    tar -czf "$small.partial" --ignore-failed-read --null --files-from "$names" 2>>"$out/copy.log" || (($? == 1)) || return
    mv "$small.partial" "$small"
    rm "$names" "$out/copy.log"
}

try_to_copy() {
    copy || say "runs/ could not be copied ($(tail -n 1 "$out/copy.log"))"
}

processes=()
for line in "${lines[@]}"; do
    read -ra words <<<"$line"
    timeout --kill-after=10 "$seconds" "$pn" "${words[@]}" >>"runs/logs/$((${#processes[@]} + 1)).log" 2>&1 &
    processes+=($!)
done
trap 'kill "${processes[@]}" 2>/dev/null || true' EXIT
while [[ -n $(jobs -pr) ]]; do
    for ((waited = 0; waited < every; waited++)); do
        [[ -z $(jobs -pr) ]] || sleep 1
    done
    [[ -z $(jobs -pr) ]] || try_to_copy
done
try_to_copy  # after the last word of the last command
failed=0
for number in "${!processes[@]}"; do
    code=0
    wait "${processes[number]}" || code=$?
    case $code in
        0) state=finished ;;
        124 | 137 | 143) state="cut off; the same command goes on" ;;
        *) state="FAILED, see runs/logs/$((number + 1)).log" failed=1 ;;
    esac
    say "pn ${lines[number]}: $state"
done
exit "$failed"
