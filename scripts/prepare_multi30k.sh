#!/usr/bin/env bash
# `pn prepare multi30k` in the project's environment; pn_fairseq/pipeline/data/recipes/multi30k.py has the steps.
exec bash "$(dirname "$(readlink -f "$0")")/pn" prepare multi30k "$@"
