# shellcheck shell=bash
# Getting the text of a corpus that is published in several files. Sourced by prepare_*.sh, after common.sh and
# prepare.sh; never run.
: "${root:?the sourcing script sets it to the top of the repository}"

# What a script may set: the md5 of files, by name, where that is all that is published. A mirror may hold something
# else on purpose.
declare -A md5=()

# fetch_all FOLDER MARK URL...: FOLDER/NAME for each URL, NAME being its last part: downloaded, unless `given`, a folder
# that the user has named, is it. `fetched` becomes their checksums. Where the file MARK has those that the text was made
# of, files that were removed since are not missed.
given=""
fetch_all() {
    local folder=$1 mark=$2 url name known names=()
    shift 2
    for url; do
        name=${url##*/}
        names+=("$name")
        if [[ -f $mark && ! -f $folder/$name ]]; then
            fetched=$(<"$mark")
            return
        fi
        [[ -z $given || -f $folder/$name ]] || die "there is no $name in '$folder' (--archive); it comes from $url"
    done
    if [[ -z $given ]]; then
        for url; do
            known=${md5[${url##*/}]:-}
            [[ -z ${DATA_MIRROR:-} ]] || known=""
            step fetch "$url" "$folder/${url##*/}" ${known:+--md5 "$known"}
        done
    fi
    fetched=$(cd "$folder" && sha256sum "${names[@]}") || die "cannot read the files in '$folder'"
}

# is_of MARK: MARK says that the text was made of what was fetched.
is_of() { [[ -f $1 && $(<"$1") == "$fetched" ]]; }

# extract ARCHIVE FOLDER MEMBER...: FOLDER with these members.
extract() {
    local archive=$1 folder=$2 member flags=()
    shift 2
    for member; do flags+=(--member "$member"); done
    say "extracting $(basename "$archive")"
    step unpack "$archive" "$folder" "${flags[@]}"
}

# add_text FILE TEXT: the lines of FILE at the end of TEXT. A carriage return is no end of a line: it is white space, as
# it is for Moses.
add_text() {
    # $a\ adds the line feed that a last line may lack.
    # shellcheck disable=SC1003
    LC_ALL=C sed -e 's/\r$//' -e 's/\r/ /g' -e '$a\' "$1" >>"$2" || die "cannot add $1 to '$2'; is the disk full?"
}

# compare_count WHAT FOUND KNOWN: say so where a corpus has not the size it is known to have.
compare_count() {
    [[ $2 -eq $3 ]] || say "note: $1 has $2 sentence pairs here; the published one has $3"
}
