#!/usr/bin/env bash
# The Penn Treebank for language modeling (Mikolov et al. 2011), from a local folder, for scripts/train.sh ptb_lm.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/prepare_ptb.sh --corpus DIR [--dest DIR] [--workers N]

Takes ptb.train.txt, ptb.valid.txt and ptb.test.txt from --corpus, as in Mikolov's simple-examples.tgz (data/), with
10,000 words and <unk>. The text is under the licence of LDC99T42, which does not allow distribution: it is neither in this
repository nor downloaded. Refuses text that does not have 929,589 / 73,760 / 82,430 tokens, ends of lines included.

  --corpus DIR  the folder with the three files
  --dest DIR    where the data goes (default runs/data/ptb_lm)
END
}

# shellcheck source=lib/prepare.sh
source "$(dirname "$(readlink -f "$0")")/lib/prepare.sh"

corpus="" dest=$root/runs/data/ptb_lm
parse_options "$@"
[[ -n $corpus ]] || die "--corpus is needed (see --help)"
need_text "$corpus" ptb.{train,valid,test}.txt
check_tools
open_dest
data lm-text PTB "$(absolute "$corpus")"/ptb.{train,valid,test}.txt --expect 929589 73760 82430
