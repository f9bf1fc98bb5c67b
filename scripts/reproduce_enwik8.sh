#!/usr/bin/env bash
# enwik8, bytes: the language models of the AdaNorm paper.
exec bash "$(dirname "$(readlink -f "$0")")/pn" reproduce enwik8 "$@"
