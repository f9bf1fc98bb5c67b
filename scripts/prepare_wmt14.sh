#!/usr/bin/env bash
# `pn prepare wmt14` in the project's environment; pn_fairseq/pipeline/data/recipes/wmt14.py has the steps.
exec bash "$(dirname "$(readlink -f "$0")")/pn" prepare wmt14 "$@"
