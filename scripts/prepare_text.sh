#!/usr/bin/env bash
# `pn prepare text` in the project's environment; pn_fairseq/pipeline/data/recipes/text.py has the steps.
exec bash "$(dirname "$(readlink -f "$0")")/pn" prepare text "$@"
