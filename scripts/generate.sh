#!/usr/bin/env bash
# Translate a subset with the model of a run.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/generate.sh --run DIR [--checkpoint FILE] [--subset test] [--beam N] [--lenpen X] [--output DIR]

  --run DIR          a run of scripts/train.sh
  --checkpoint FILE  default DIR/checkpoints/averaged.pt (scripts/average.sh makes it)
  --subset NAME      test (default) or valid
  --beam, --lenpen   beam size and length penalty (default: the run's configuration)
  --output DIR       default DIR/generate/SUBSET; gets hyp.tok (one hypothesis a line, in the order of the text),
                     ref.tok, src.tok and fairseq's own output in generate.log

As many hypotheses come out as sentences go in, or the script fails. Does nothing if the output is there and newer than
the checkpoint.
END
}

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=lib/run.sh
source "$root/scripts/lib/run.sh"

run="" checkpoint="" subset=test beam="" lenpen="" output=""
while [[ $# -gt 0 ]]; do
    case $1 in
    --run) option_value "$1" $#; run=$2; shift 2 ;;
    --checkpoint) option_value "$1" $#; checkpoint=$2; shift 2 ;;
    --subset) option_value "$1" $#; subset=$2; shift 2 ;;
    --beam) option_value "$1" $#; beam=$2; shift 2 ;;
    --lenpen) option_value "$1" $#; lenpen=$2; shift 2 ;;
    --output) option_value "$1" $#; output=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument '$1' (see --help)" ;;
    esac
done
use_venv
need python fairseq-generate
check_run "$run"
checkpoint=${checkpoint:-$run/checkpoints/averaged.pt}
[[ -f $checkpoint ]] || die "there is no checkpoint '$checkpoint' (scripts/average.sh makes averaged.pt)"
data=$(<"$run/data")
source=$(data_setting "$data" source)
target=$(data_setting "$data" target)
[[ -f $data/tok/$subset.$source ]] || die "'$data' has no subset '$subset'"
beam=${beam:-$(config_value "$run" generation.beam 5)}
lenpen=${lenpen:-$(config_value "$run" generation.lenpen 1.0)}
check_whole --beam "$beam"
[[ $lenpen =~ ^-?[0-9]+(\.[0-9]+)?$ ]] || die "--lenpen must be a number, not '$lenpen'"
output=${output:-$run/generate/$subset}

made="$checkpoint beam=$beam lenpen=$lenpen"
if [[ -f $output/hyp.tok && $output/hyp.tok -nt $checkpoint && $(cat "$output/made" 2>/dev/null) == "$made" ]]; then
    say "$output/hyp.tok is there already"
    exit 0
fi
# Everything is made beside and takes its place at the end.
partial=$output.partial
rm -rf "$partial"
mkdir -p "$partial" 2>/dev/null || die "cannot make the directory '$partial' (--output)"

cpu_allocator
say "decoding $subset with $checkpoint (beam $beam, length penalty $lenpen)"
# Without the batch multiple of 1 fairseq drops the last sentences of a batch without a word.
fairseq-generate "$data/bin" --user-dir "$root/pn_fairseq" --path "$checkpoint" --gen-subset "$subset" \
    --source-lang "$source" --target-lang "$target" --beam "$beam" --lenpen "$lenpen" --remove-bpe \
    --max-tokens 8000 --required-batch-size-multiple 1 >"$partial/generate.log" 2>"$partial/generate.err" ||
    die "fairseq-generate failed: $(tail -n 1 "$partial/generate.err") (all of it in $partial/generate.err)"

# Hypotheses come in the order of length, with the number of their sentence.
hypotheses() { sed -n 's/^H-//p' "$partial/generate.log" | sort -n -k1,1 | cut -f 3-; }
numbers() { sed -n 's/^H-\([0-9]*\)\t.*/\1/p' "$partial/generate.log" | sort -n; }
expected=$(lines "$data/tok/$subset.$source")
cmp -s <(numbers) <(seq 0 $((expected - 1))) ||
    die "$expected sentences went in and $(numbers | wc -l) hypotheses came out (see $partial/generate.log)"
cp "$data/tok/$subset.$source" "$partial/src.tok"
cp "$data/tok/$subset.$target" "$partial/ref.tok"
make_file "$partial/hyp.tok" hypotheses
same_lines "$partial/ref.tok" "$partial/hyp.tok"
rm -f "$partial/generate.err"
echo "$made" >"$partial/made"
rm -rf "$output"
mv "$partial" "$output"
say "$output/hyp.tok has $expected hypotheses"
