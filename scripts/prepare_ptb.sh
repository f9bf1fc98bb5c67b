#!/usr/bin/env bash
# `pn prepare ptb` in the project's environment; pn_fairseq/pipeline/data/recipes/ptb.py has the steps.
exec bash "$(dirname "$(readlink -f "$0")")/pn" prepare ptb "$@"
