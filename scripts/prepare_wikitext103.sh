#!/usr/bin/env bash
# WikiText-103 (Merity et al. 2017), prepared for scripts/train.sh wikitext103_lm.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/prepare_wikitext103.sh [--archive DIR] [--dest DIR] [--workers N]

Downloads wikitext-103-v1.zip (190 MB; CC BY-SA 3.0 and GFDL) and makes fairseq's binary data in --dest. Refuses text
that does not have 103,227,021 / 217,646 / 245,569 tokens, ends of lines included.

  --archive DIR  a folder with wikitext-103-v1.zip, instead of the download
  --dest DIR     where the data goes (default runs/data/wikitext103_lm)
END
}

# shellcheck source=lib/prepare.sh
source "$(dirname "$(readlink -f "$0")")/lib/prepare.sh"

# The address in the paper (s3.amazonaws.com/research.metamind.io) is dead since February 2024.
url=https://wikitext.smerity.com/wikitext-103-v1.zip
archive="" dest=$root/runs/data/wikitext103_lm
parse_options "$@"
check_tools
open_dest
folder=$(absolute "${archive:-$dest/download}")
# The checksum that dataset catalogues name for the file of the dead address.
get "$folder" "$url" --sha256 242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590
data unzip "$folder/wikitext-103-v1.zip" unpacked wikitext-103/wiki.{train,valid,test}.tokens
data lm-text WikiText-103 unpacked/wiki.{train,valid,test}.tokens --expect 103227021 217646 245569
